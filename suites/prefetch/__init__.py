"""Prefetch: which unit is gathered and reduced when, by default and on request; a wrong hint costs only time."""
