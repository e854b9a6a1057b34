"""The saved data of a run, as values: records, the run folder, observations, timelines."""
