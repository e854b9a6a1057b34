"""Prefetch: which unit is gathered and reduced when, by default and as asked; a wrong hint costs only time."""
