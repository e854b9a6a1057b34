"""Where a mutant of the reference engine reaches in: the communication groups of a prepared model. No mutant here."""

from __future__ import annotations

from collections.abc import Iterator

from engine.contract import PreparedModel
from engine.reference.param_group import Group
from engine.reference.state import unit_of

__all__ = ["groups_of"]


def groups_of(prepared: PreparedModel) -> Iterator[Group]:
    """Give each group once, those of inner modules included."""
    units = (unit_of(module) for module in prepared.module.modules())
    for unit in dict.fromkeys(u for u in units if u is not None):
        yield from unit.groups
