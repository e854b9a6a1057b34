"""Tests of the runner: cases in worlds, and the results that it keeps between them."""
