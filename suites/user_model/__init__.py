"""Own model: the general promises, on a user's model: the one of `--model`, else a small decoder."""
