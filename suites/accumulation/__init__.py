"""Accumulation: which units skip reductions, microbatches in other orders, and the communication that this costs."""
