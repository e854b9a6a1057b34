"""Accumulation: which units hold their reductions back, in which order microbatches go, what it costs."""
