"""Unused, frozen and ignored parameters: they do not change, and no rank waits for them."""
