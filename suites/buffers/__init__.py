"""Buffers: each rank keeps its own, with every change of its forwards."""
