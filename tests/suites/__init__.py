"""Tests of claims and fixtures, of which suites are made."""
