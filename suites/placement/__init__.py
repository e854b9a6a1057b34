"""Placement: which dim of a parameter is sharded, shapes that no world divides, and the parameters in modules."""
