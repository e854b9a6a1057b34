"""Tests of the reference engine on its own: its interfaces, called as a user calls them."""
