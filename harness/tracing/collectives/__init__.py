"""Interception of the collectives of every backend, inside torch's own operators."""
