"""Scale: a rank's bytes sent and held do not grow with the number of ranks, up to thousands; in simulated worlds."""
