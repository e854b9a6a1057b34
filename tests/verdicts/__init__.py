"""Tests of which verdict follows from laws and the ends of ranks."""
