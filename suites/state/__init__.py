"""State: the state of one prepared model loads into another, and training goes on as if uninterrupted."""
