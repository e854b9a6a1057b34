"""Parity: the engine trains what one process with the whole batch trains, tensor by tensor on every rank."""
