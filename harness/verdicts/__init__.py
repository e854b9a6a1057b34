"""From the laws and the ends of ranks to a verdict: vacuity, hangs, known failures."""
