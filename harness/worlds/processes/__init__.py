"""The processes of a world: how they start, report, end, and what they leave behind."""
