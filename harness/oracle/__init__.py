"""The oracle: the same training on one process, without an engine and without communication."""
