"""Experts on a mesh of their own, in one unit with weights that lie on all ranks."""
