"""Shapes: parameters too small to shard are trained right or refused, never wrong."""
