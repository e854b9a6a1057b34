"""Tests of the pages and files that are made of records."""
