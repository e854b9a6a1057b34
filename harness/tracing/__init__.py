"""Records the activity of a rank: collectives, units, streams and memory."""
