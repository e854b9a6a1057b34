"""Shared parameters: one parameter in several places, and several models in one place."""
