"""Tensor parallel: data parallelism over tensors that are cut already."""
