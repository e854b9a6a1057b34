"""Adapters of engines in other packages, none of which has to be installed: each module imports its engine."""
