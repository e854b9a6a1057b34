"""Tests of the parts of torch below its public interface."""
