"""Scripts: what training loops do between two optimizer steps, one file for each kind of loop."""
