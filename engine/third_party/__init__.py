"""Adapters of engines in packages of their own, none of which has to be installed: each module imports its engine."""
