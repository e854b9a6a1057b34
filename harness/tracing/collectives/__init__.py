"""Interception of collectives: every one of every backend, seen from inside torch's own operators."""
