"""Tests of what a rank does: collectives, units, streams, memory."""
