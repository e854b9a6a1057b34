"""What a record holds as evidence, folded so that a person sees at once which ranks agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.records.record import OutcomeRecord, Record, TensorRecord
from reports.text import number, ranks, rough, size, times

__all__ = ["Bar", "LedgerRow", "OutcomeGroup", "bar", "headroom", "ledger_rows", "outcome_groups", "place"]

_DECADES = 3  # the bar reaches from a thousandth of what is allowed to a thousand times that


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Collectives of one kind in one phase, on all ranks that did the same."""

    phase: str
    op: str
    axis: str
    dtype: str
    ranks: str
    count: int
    size: str
    is_split: bool  # other ranks did something else


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeGroup:
    """Ranks that ended in the same way, with the same text."""

    ranks: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Error against allowed on a logarithmic scale; what is allowed lies at 50 percent."""

    percent: float
    is_within: bool
    words: str


def ledger_rows(record: Record) -> tuple[LedgerRow, ...]:
    """Fold the ledger over ranks, phase by phase; a rank that differs, or has no such line, stays apart."""
    everyone = set(range(record.world_size))
    like_rank_0 = everyone - {line.rank for line in record.ledger}
    kinds: dict[tuple[str, str, str, str], dict[tuple[int, int], list[int]]] = {}
    for line in record.ledger:
        same = kinds.setdefault((line.phase, line.op, line.axis, line.dtype), {})
        members = same.setdefault((line.count, line.num_bytes), [])
        members += [0, *sorted(like_rank_0)] if line.rank == 0 else [line.rank]
    phases = list(dict.fromkeys(phase for phase, *_ in kinds))
    rows = (
        LedgerRow(
            phase=phase,
            op=op,
            axis=axis,
            dtype=dtype,
            ranks=f"all {len(everyone)} ranks" if everyone <= set(members) else ranks(members),
            count=count,
            size=size(num_bytes),
            is_split=not everyone <= set(members),
        )
        for (phase, op, axis, dtype), same in kinds.items()
        for (count, num_bytes), members in same.items()
    )
    return tuple(sorted(rows, key=lambda row: phases.index(row.phase)))


def outcome_groups(record: Record) -> tuple[OutcomeGroup, ...]:
    """Fold outcomes over ranks; first those that have something to say, the others only follow from them."""
    groups: dict[tuple[str, str], list[OutcomeRecord]] = {}
    for outcome in sorted(record.outcomes, key=lambda o: not o.text):
        groups.setdefault((outcome.kind, outcome.text), []).append(outcome)
    return tuple(
        OutcomeGroup(ranks=ranks(o.rank for o in members), kind=kind, text=text)
        for (kind, text), members in groups.items()
    )


def bar(worst: TensorRecord) -> Bar:
    """Place an error on the scale."""
    is_within = worst.ratio <= 1  # False for NaN
    if math.isnan(worst.ratio) or worst.ratio == math.inf:
        position = 1.0
    elif worst.ratio <= 0:
        position = 0.0
    else:
        position = (math.log10(worst.ratio) + _DECADES) / (2 * _DECADES)
    percent = round(100 * min(max(position, 0.0), 1.0), 1)
    return Bar(percent=percent, is_within=is_within, words=times(worst.ratio))


def place(worst: TensorRecord) -> str:
    """Say where the worst element is."""
    index = f"[{', '.join(map(str, worst.index))}]" if worst.index else ""
    return f"{worst.quantity} {worst.name}{index} on rank {worst.rank} at step {worst.step}"


def headroom(worst: TensorRecord) -> str:
    """Say how far off the worst element is."""
    return (
        f"got {number(worst.got)}, expected {number(worst.expected)}; error {rough(worst.error)}"
        f" of {rough(worst.allowed)} allowed ({times(worst.ratio)}); {worst.share:.1%} of elements beyond"
    )
