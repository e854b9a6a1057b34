"""Training goes on after an exception, and around evaluations, as if there had been none."""
