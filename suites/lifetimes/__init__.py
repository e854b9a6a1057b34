"""Lifetimes: parameters, gradients, buffers and the user's tensors stay in memory as long as needed, and no longer."""
