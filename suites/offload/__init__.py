"""Offload: parameters, gradients and optimizer state are on the host, and the trained model is the same."""
