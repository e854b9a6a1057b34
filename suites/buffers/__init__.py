"""Buffers: each rank keeps its own, with every change that forward makes."""
