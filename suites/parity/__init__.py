"""Parity: the engine trains like one process with the whole batch, tensor by tensor on every rank."""
