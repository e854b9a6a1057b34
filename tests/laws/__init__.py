"""Tests of laws over observed trainings."""
