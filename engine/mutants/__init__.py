"""Engines wrong on purpose, grouped by defect class: a law that none of them breaks proves nothing."""
