"""State: what one prepared model hands out, another takes, and training goes on as if nothing had been."""
