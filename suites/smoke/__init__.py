"""Smoke: the engine trains at all, and trains the same model; seconds per engine."""
