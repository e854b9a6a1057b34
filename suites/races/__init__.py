"""Races: streams wait before they touch memory that another stream writes, reads or frees."""
