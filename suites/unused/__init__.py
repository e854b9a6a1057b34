"""Unused, frozen and ignored parameters: they stay as they are, and no rank waits for them."""
