"""Tests of mutation testing and coverage of torch's tests."""
