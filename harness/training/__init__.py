"""The training loop around an engine, and the oracle: the same training on one process."""
