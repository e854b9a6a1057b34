"""Lifetimes: which memory of what kind is alive when, on each rank, and whose it is."""
