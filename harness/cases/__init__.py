"""What a case asks: the training, its schedule, the script of its loop, the units of its plan."""
