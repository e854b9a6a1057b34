"""Building blocks: common parts of models, each trained as one process trains it."""
