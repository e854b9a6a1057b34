"""Tensor parallel: data parallelism over tensors that are already sharded."""
