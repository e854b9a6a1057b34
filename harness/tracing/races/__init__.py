"""Stream races, found without a device: which operator touched which memory, and what ordered it."""
