"""Scale: bytes sent and held by a rank do not grow with the number of ranks, up to thousands; in simulated worlds."""
