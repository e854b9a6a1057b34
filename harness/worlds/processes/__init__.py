"""The processes of a world: how they start, report and end, and which processes they leave behind."""
