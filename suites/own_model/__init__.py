"""Own model: the general promises, on a model of the user: the one that `--model` names, else a small decoder."""
