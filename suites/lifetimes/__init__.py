"""Lifetimes: parameters, gradients, buffers and the user's tensors are held as long as needed, and no longer."""
