"""Offload: parameters, gradients and optimizer state live on the host, and the trained model is the same."""
