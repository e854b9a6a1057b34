"""Pipelines: stages on different ranks, data parallelism inside each stage."""
