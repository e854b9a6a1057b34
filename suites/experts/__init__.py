"""Experts: expert parallelism on a mesh of its own, in one unit with weights that all ranks share."""
