"""Precision: what is computed, accumulated, reduced and kept in the dtype asked for, and loses no more than that."""
