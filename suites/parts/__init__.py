"""Parts: parts of a model run alone, several times, or not at all; the numbers are the oracle's."""
