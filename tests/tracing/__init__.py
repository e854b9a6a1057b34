"""Tests of tracing a rank: collectives, units, streams, memory."""
