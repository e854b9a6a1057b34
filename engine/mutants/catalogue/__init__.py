"""The catalogue of mutants, one file per class of defect; what a mutant does is in the module of the same name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from engine.mutants.mutant import Mutant

__all__ = ["MUTANTS"]


def _all() -> Iterator[Mutant]:
    """Give the entries of every file of this folder, files in the order of their names."""
    for found in pkgutil.iter_modules(__path__):
        yield from importlib.import_module(f"{__name__}.{found.name}").MUTANTS


MUTANTS: tuple[Mutant, ...] = tuple(_all())
