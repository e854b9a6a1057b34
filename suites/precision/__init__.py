"""Precision: values are computed, accumulated, reduced and kept in the dtype asked for, and lose no more than that."""
