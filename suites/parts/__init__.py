"""Parts of a model run by themselves, several times, or not at all; numbers are still those of the oracle."""
