"""All mutants: imports every module of this folder, so that a rank that needs one mutant imports only its module."""

from __future__ import annotations

import importlib
import pkgutil

import shardproof.engine.mutants
from shardproof.engine.mutants.mutant import DECLARED, Mutant


def _all() -> tuple[Mutant, ...]:
    for found in pkgutil.iter_modules(shardproof.engine.mutants.__path__, "shardproof.engine.mutants."):
        importlib.import_module(found.name)
    # Modules import each other, so their order differs from that of their names.
    return tuple(sorted(DECLARED, key=lambda mutant: mutant.engine_spec.partition(":")[0]))


MUTANTS: tuple[Mutant, ...] = _all()
