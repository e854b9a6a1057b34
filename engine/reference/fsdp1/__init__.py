"""FSDP1's interface on the same core: ``FullyShardedDataParallel`` stands in a module's place."""
