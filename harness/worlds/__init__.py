"""Runs N ranks as threads of one process, or as processes of their own, behind one function."""
