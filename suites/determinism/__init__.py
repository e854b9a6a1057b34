"""Determinism: a training repeated from the same start ends in the same bits."""
