"""Memory is held for as long as it must be, and no longer: parameters, gradients, buffers, and what is the user's."""
