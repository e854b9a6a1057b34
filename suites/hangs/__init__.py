"""Hangs: a rank comes to the end of its training, or somebody is told at once what it waits for."""
