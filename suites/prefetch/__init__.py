"""Prefetch: which unit is gathered and reduced when, by itself and as asked; a wrong hint costs time alone."""
