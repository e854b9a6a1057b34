"""Laws over memory: peaks, what is left after a step, what a layout explains."""
