"""Offload: parameters, gradients and optimizer state live on the host, and train alike."""
