"""Determinism: a training repeated from the same start comes out the same, bit by bit."""
