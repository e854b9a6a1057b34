"""The insides of the reference engine that mutants reach into: units, groups of parameters, and lanes."""

from __future__ import annotations

from engine.contract import PreparedModel
from engine.reference.comm_context import Lanes
from engine.reference.param_group import Group
from engine.reference.state import Unit, unit_of

__all__ = ["lanes_of", "reference_groups", "reference_units"]


def reference_units(prepared: PreparedModel) -> list[Unit]:
    """Give the units of a model that the reference engine prepared, each once."""
    found = (unit_of(module) for module in prepared.module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def reference_groups(prepared: PreparedModel) -> list[Group]:
    """Give the groups of parameters of all units."""
    return [group for unit in reference_units(prepared) for group in unit.groups]


def lanes_of(prepared: PreparedModel) -> list[Lanes]:
    """Give the lanes of all units, each once; the root's, which may have no group, are everybody's once it has run."""
    return list(dict.fromkeys(unit.lanes for unit in reference_units(prepared)))
