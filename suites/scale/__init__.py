"""Scale: what a rank of thousands says and holds does not grow with their number; in simulated worlds."""
