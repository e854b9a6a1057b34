"""Tests of `shardproof check`: reading a user's model, refusing mistakes, judging engines by it."""
