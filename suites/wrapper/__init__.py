"""The interface of FullyShardedDataParallel: every option, method, context and state dict of the wrapper."""
