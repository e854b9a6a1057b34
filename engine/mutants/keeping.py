"""What mutants share that keep what an engine lets go of: a place for it, and where to take it from; no engine here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.adapters.composable import PreparedComposable
from engine.adapters.reference import PreparedReference
from engine.adapters.torch_fsdp2 import PreparedFullyShard
from engine.contract import PreparedModel

__all__ = [
    "Keeping",
    "KeepingFsdp2",
    "KeepingReference",
    "taking",
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


def taking(
    prepared: PreparedModel,
    groups: Callable[[PreparedModel], Sequence[Any]],
    when: Callable[[Any, str, Callable[[Any], None]], None],
    method: str,
    take: Callable[[Any, list[Any]], None],
) -> PreparedModel:
    """Have each group's memory taken to what is kept, ``when`` it calls a method: `before` or `after`."""
    assert isinstance(prepared, Keeping)
    kept = prepared.kept
    for group in groups(prepared):
        when(group, method, lambda of: take(of, kept))
    return prepared
