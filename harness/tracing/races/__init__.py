"""Finds stream races without a device: which operator accessed which memory, and what ordered it."""
