"""Tests of verdicts, which follow from laws and from the ends of ranks."""
