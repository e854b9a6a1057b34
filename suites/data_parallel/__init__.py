"""Data parallel: every option and method of DistributedDataParallel does what it says, and is refused what it must."""
