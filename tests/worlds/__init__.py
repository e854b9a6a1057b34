"""Tests of worlds: how ranks start, communicate and end."""
