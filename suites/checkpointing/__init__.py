"""Checkpointing: activations recomputed in backward change no number and add no communication."""
