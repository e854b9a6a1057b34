"""Programs that combine traits of a model, options of a plan and moves of a loop: every pair, and triples that interact."""
