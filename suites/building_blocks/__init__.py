"""Building blocks: what people build models of, each trained as one process trains it."""
