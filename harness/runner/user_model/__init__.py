"""Reading a user's model: its study in a process of its own, what it demands of engines, and its summary."""
