"""Laws: what must hold of an observed training. Values in, values out."""
