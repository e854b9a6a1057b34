"""Spelling what units are at a moment."""

from __future__ import annotations

from harness.laws.notes import UnitState

__all__ = ["states"]


def states(
    moment: str, *, unsharded: tuple[str, ...] = (), sharded: tuple[str, ...] = ()
) -> tuple[UnitState, ...]:
    """Say of each unit what it is at that moment."""
    return (
        *(UnitState(moment=moment, unit=unit, is_unsharded=True) for unit in unsharded),
        *(UnitState(moment=moment, unit=unit, is_unsharded=False) for unit in sharded),
    )
