"""What mutants share that keep what an engine lets go of: a place for it, and where to take it from; no engine here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.adapters.composable import PreparedComposable
from engine.adapters.reference import PreparedReference
from engine.adapters.torch_fsdp2 import PreparedFullyShard
from engine.contract import PreparedModel
from engine.reference.group import Group
from engine.reference.unit import unit_of

__all__ = [
    "Keeping",
    "KeepingFsdp2",
    "KeepingReference",
    "after",
    "before",
    "fsdp2_groups",
    "reference_groups",
]

# Any, throughout: FSDP2's insides have no public types.


class Keeping(PreparedComposable):
    """Has a place for what it should let go; empty again once the optimizer has stepped, unless it grows."""

    grows = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Any] = []

    def step(self) -> None:
        """Update the parameters, then let go."""
        super().step()
        if not self.grows:
            self.kept.clear()


class KeepingFsdp2(Keeping, PreparedFullyShard):
    """FSDP2's."""


class KeepingReference(Keeping, PreparedReference):
    """The reference engine's."""


def before(holder: Any, method: str, sin: Callable[[Any, list[Any]], None], kept: list[Any]) -> None:
    """Have ``sin`` done before each call of a method of this one object."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        sin(holder, kept)
        return honest(*args, **kwargs)

    setattr(holder, method, both)


def after(holder: Any, method: str, sin: Callable[[Any, list[Any]], None], kept: list[Any]) -> None:
    """Have ``sin`` done after each call of a method of this one object."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        sin(holder, kept)
        return result

    setattr(holder, method, both)


def fsdp2_groups(prepared: PreparedModel) -> list[Any]:
    """Give the groups of FSDP2."""
    modules: list[Any] = list(prepared.module.modules())
    states = dict.fromkeys(m._get_fsdp_state() for m in modules if hasattr(m, "_get_fsdp_state"))
    return [group for state in states for group in state._fsdp_param_groups]


def reference_groups(prepared: PreparedModel) -> list[Group]:
    """Give the groups of the reference engine."""
    found = (unit_of(module) for module in prepared.module.modules())
    return [group for unit in dict.fromkeys(u for u in found if u is not None) for group in unit.groups]
