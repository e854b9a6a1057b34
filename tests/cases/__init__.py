"""Tests of trainings and their digests."""
