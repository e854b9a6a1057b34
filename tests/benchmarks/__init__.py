"""Tests of benchmarks and the pages that they write."""
