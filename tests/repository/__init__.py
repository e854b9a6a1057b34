"""Rules of the repository itself: imports, documentation, prose, packaging."""
