"""Parts: parts of a model run directly, several times, or not at all; the numbers are the oracle's."""
