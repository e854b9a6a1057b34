"""Data parallel: every option of DistributedDataParallel does what is documented, and refuses what it must."""
