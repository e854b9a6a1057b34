"""Tests of what is kept of a run."""
