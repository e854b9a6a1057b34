"""The scripts: what training loops do between two optimizer steps, one file per kind of loop."""
