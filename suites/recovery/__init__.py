"""Recovery: after an exception, and around evaluations, training goes on as if there had been none."""
