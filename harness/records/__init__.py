"""What is kept of a run, as values: records, the run folder, observations, timelines."""
