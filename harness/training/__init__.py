"""The training loop around an engine: what a rank does, from preparation to its observation."""
