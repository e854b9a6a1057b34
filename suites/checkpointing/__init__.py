"""Activations made again in backward change no number, and cost no communication."""
