"""What the suites are worth: mutation testing, coverage of upstream tests."""
