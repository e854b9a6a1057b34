"""Inputs: forward accepts nested inputs, or none, on any device."""
