"""Wrapper: every option and method of FullyShardedDataParallel does what is documented, and refuses what it must."""
