"""FSDP1's front door on the same core: ``FullyShardedDataParallel`` stands in a module's place."""
