"""One file per engine; `engine.registry` loads them by name."""
