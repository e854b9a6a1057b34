"""Tests of campaigns and the pages that they write."""
