"""Tests of how ranks live and end."""
