"""How the communication of one case differs between two records: counts and bytes, by rank and kind. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardproof.harness.records.record import Record, Verdict

# The ledgers of such records end where the world was stopped, so their counts vary from run to run.
_UNFINISHED = frozenset(
    {Verdict.UNSUPPORTED, Verdict.HUNG, Verdict.CRASHED, Verdict.ERRORED, Verdict.NOT_RUN}
)
_NO_ENTRIES = "none"  # the op of a line for a rank without any entry


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Traffic:
    """Collectives of one kind on one rank: how many, and their bytes in all."""

    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficChange:
    """One kind of collective whose count or bytes differ, on all ranks with the same numbers."""

    ranks: tuple[int, ...]
    is_everywhere: bool  # whether these are all ranks of the world
    phase: str
    op: str
    axis: str
    dtype: str
    before: Traffic
    after: Traffic


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Kind:
    phase: str
    op: str
    axis: str
    dtype: str


_Lines = dict[_Kind, Traffic]
_NONE = Traffic(count=0, num_bytes=0)


def is_measured(record: Record) -> bool:
    """Whether every rank ran to its end, so that the ledger is whole."""
    expectation = record.expectation
    is_known = record.verdict is Verdict.KNOWN_FAILURE and expectation is not None
    verdict = expectation.verdict if is_known and expectation is not None else record.verdict
    return verdict not in _UNFINISHED and all(outcome.kind == "Returned" for outcome in record.outcomes)


def traffic_changes(before: Record, after: Record) -> tuple[TrafficChange, ...]:
    """List the kinds of collectives whose count or bytes differ, with the ranks where they do."""
    old, new = _by_rank(before), _by_rank(after)
    ranks: dict[tuple[_Kind, Traffic, Traffic], list[int]] = {}
    # A rank without lines of its own did the same as rank 0; only the others need comparing.
    own = {0, *old, *new}
    alike = sorted(set(range(after.world_size)) - own)
    for rank in sorted(own):
        members = [rank, *alike] if rank == 0 else [rank]
        for change in _between(old.get(rank, old.get(0, {})), new.get(rank, new.get(0, {}))):
            ranks.setdefault(change, []).extend(members)
    return tuple(
        TrafficChange(
            ranks=tuple(sorted(members)),
            is_everywhere=len(members) == len(own) + len(alike),
            phase=kind.phase,
            op=kind.op,
            axis=kind.axis,
            dtype=kind.dtype,
            before=was,
            after=now,
        )
        for (kind, was, now), members in ranks.items()
    )


def _between(old: _Lines, new: _Lines) -> Iterable[tuple[_Kind, Traffic, Traffic]]:
    for kind in dict.fromkeys((*old, *new)):
        was, now = old.get(kind, _NONE), new.get(kind, _NONE)
        if was != now:
            yield kind, was, now


def _by_rank(record: Record) -> dict[int, _Lines]:
    found: dict[int, _Lines] = {}
    for line in record.ledger:
        lines = found.setdefault(line.rank, {})
        if line.op == _NO_ENTRIES:
            continue
        kind = _Kind(phase=line.phase, op=line.op, axis=line.axis, dtype=line.dtype)
        seen = lines.get(kind, _NONE)
        lines[kind] = Traffic(count=seen.count + line.count, num_bytes=seen.num_bytes + line.num_bytes)
    return found
