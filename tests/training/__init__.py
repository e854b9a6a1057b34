"""Tests of the loop around an engine, and the oracle."""
