"""Data parallelism over tensors that are cut already."""
