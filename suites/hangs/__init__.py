"""Hangs: a rank ends its training, or the harness reports at once what it waits for."""
