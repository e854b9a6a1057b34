"""Inputs: forward takes them nested, or not at all, wherever they come from."""
