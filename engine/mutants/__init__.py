"""Engines wrong on purpose, grouped by defect class: a law that none of them breaks proves nothing."""

from engine.mutants.catalogue import MUTANTS
from engine.mutants.mutant import Condition, Mutant, Trace

__all__ = ["MUTANTS", "Condition", "Mutant", "Trace"]
