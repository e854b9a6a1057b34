"""Buffers: what is no parameter stays each rank's own, whatever forward makes of it."""
