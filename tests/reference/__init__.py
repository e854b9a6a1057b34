"""Tests of the reference engine on its own: the front doors, called as a user calls them."""
