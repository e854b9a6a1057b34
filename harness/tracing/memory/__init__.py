"""Records which memory of which kind is live at which time on each rank, and how much remains between steps."""
