"""Stream races, found without a device: who wrote, read and released which memory, and what ordered it."""
