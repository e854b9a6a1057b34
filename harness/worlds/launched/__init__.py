"""Ranks beside processes that a launcher started: identifies them, connects them, and supervises remote hosts."""
