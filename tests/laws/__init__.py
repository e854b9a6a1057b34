"""Tests of what must hold of an observed training."""
