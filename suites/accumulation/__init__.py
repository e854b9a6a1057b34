"""Accumulation by units: which of them skip reductions, microbatches in other orders, and what this communicates."""
