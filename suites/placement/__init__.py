"""Placement: which dim of a parameter is sharded, shapes that no world divides, and what modules show of them."""
