"""Sharding state: when units are gathered and freed, by policy or by hand, and what modules show meanwhile."""
