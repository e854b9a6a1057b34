"""Precision: values are computed, accumulated, reduced and stored in the planned dtype, and lose no more than that."""
