"""The hang report: where each rank of a world was when it could not go on, and why. Values only; no torch here.

It is made by ``harness.verdicts.hang_analysis`` and travels in records.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RankActivity(StrEnum):
    """What a rank was doing when its world was stopped."""

    WAITING = "waiting"  # in a call that has not completed
    OUTSIDE = (
        "outside"  # in no call: it computes, sleeps, or is blocked by something that is no communication
    )
    RETURNED = "returned"  # it had come to its end
    FAILED = "failed"  # it had raised or died, for a reason of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One call of one rank; ``position`` counts the group's calls on that rank from 0, messages apart.

    ``text`` spells operation, dtype, shapes, group and call site; ``peer`` is the global rank of the root, source or
    destination. ``group_name`` is torch's where another group has the same ranks, else empty; ``thread`` is the
    engine's own where it is not the rank's, else empty.
    """

    text: str
    op: str
    group: tuple[int, ...]
    axis: str
    group_name: str
    position: int
    dtype: str
    num_bytes: int
    peer: int | None
    phase: str
    step: int
    microbatch: int
    unit: str
    thread: str
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank: how it ended, what it was doing, and where.

    ``call`` is the one it waits in, else the last it made. ``awaits`` are the global ranks that have yet to come to
    it. ``frames`` are those of its stack that are the engine's or the model's, ``stack`` are all; the innermost first.
    """

    rank: int
    ended: str
    doing: RankActivity
    call: CallRecord | None
    awaits: tuple[int, ...]
    frames: tuple[str, ...]
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Ranks that made the same call in one place of a group's order; None: they never made one."""

    ranks: tuple[int, ...]
    call: CallRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where members of a group part: at which ``position`` of its calls, the last in common before, and the sides.

    ``desynchronised`` is where they had already been in different places of the training, with calls alike:
    the first call from which on this was so without a break; empty where there is none.
    """

    group: tuple[int, ...]
    axis: str
    group_name: str
    position: int
    common: CallRecord | None
    sides: tuple[Side, ...]
    desynchronised: tuple[Side, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """Why a world could not go on: a line for a person, every rank, and the group in which it began.

    ``suspects`` are the ranks that others wait for and that wait for no rank; in a cycle of waiting ranks, all of them
    or those that most others wait for. ``cycle`` holds ranks each of which waits for the next, the last for the first.
    """

    summary: str
    suspects: tuple[int, ...]
    cycle: tuple[int, ...]
    ranks: tuple[RankState, ...]
    difference: Divergence | None
