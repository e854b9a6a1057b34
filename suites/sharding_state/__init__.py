"""Sharding state: when units are gathered and freed, by policy or by call, and the parameters of modules meanwhile."""
