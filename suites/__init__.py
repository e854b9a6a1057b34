"""The suites: one folder per promise, one set of laws per test. Suites name capabilities, never engines."""
