"""Ranks beside processes that a launcher started: who they are, how they meet, and how far hosts are supervised."""
