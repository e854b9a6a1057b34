"""What a rank does, recorded: collectives, units, streams and memory."""
