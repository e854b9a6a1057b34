"""Composable: every function and method of fully_shard does what it says, and is refused what it must."""
