"""Wrapper: every option, name and helper of FullyShardedDataParallel does what it says, and is refused what it must."""
