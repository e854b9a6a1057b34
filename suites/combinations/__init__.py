"""Programs that combine traits of a model, options of a plan and moves of a loop, so that every pair occurs."""
