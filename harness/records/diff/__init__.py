"""Two runs compared, as values."""
