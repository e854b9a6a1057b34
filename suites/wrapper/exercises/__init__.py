"""What ranks do with an engine's own FullyShardedDataParallel, and note; the cases beside say what they must note."""
