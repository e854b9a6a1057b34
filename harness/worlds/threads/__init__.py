"""Ranks as threads of one process: an in-memory backend, a cooperative scheduler, deadlock detection."""
