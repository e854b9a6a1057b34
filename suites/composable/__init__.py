"""Composable: every function and method of fully_shard does what is documented, and refuses what it must."""
