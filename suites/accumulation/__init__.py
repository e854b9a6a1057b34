"""Accumulation by units: some skip reductions, microbatches run in other orders, and the effect on communication."""
