"""What must hold: one folder per promise, one law set per test. Suites name capabilities, never engines."""
