"""The horizon: an engine is right after its warm-up, at sizes beyond its thresholds, and for faint gradients."""
