"""FSDP1's interface on the same core: ``FullyShardedDataParallel`` wraps a module."""
