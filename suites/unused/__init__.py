"""Unused, frozen and ignored parameters: they stay as they are, and nobody waits for them."""
