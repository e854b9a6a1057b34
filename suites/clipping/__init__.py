"""Clipping: gradients are scaled by their norm over all parameters and ranks."""
