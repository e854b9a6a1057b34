"""Expected states of units at a moment."""

from __future__ import annotations

from shardproof import ExpectedUnitState


def states(
    moment: str, *, unsharded: tuple[str, ...] = (), sharded: tuple[str, ...] = ()
) -> tuple[ExpectedUnitState, ...]:
    """Return the state of each unit at that moment."""
    return (
        *(ExpectedUnitState(moment=moment, unit=unit, is_unsharded=True) for unit in unsharded),
        *(ExpectedUnitState(moment=moment, unit=unit, is_unsharded=False) for unit in sharded),
    )
