"""Tests of what suites are written with: claims and fixtures."""
