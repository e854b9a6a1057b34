"""The census: how many bytes each rank holds between steps, and how many the plan's layout explains."""
