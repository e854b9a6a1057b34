"""Which memory of what kind is alive when on each rank, and how much of it between steps."""
