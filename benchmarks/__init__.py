"""Ratios measured within one run; absolute times are printed for orientation only."""
