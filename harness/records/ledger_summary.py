"""Ledgers summarized for the record: equal entries are counted, ranks equal to rank 0 left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardproof.harness.records.record import LedgerLine
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase

# The order in which a training passes through them; StrEnum itself would sort by spelling.
_PHASES = tuple(Phase)
_OPS = tuple(Op)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The common properties of the entries of one line."""

    phase: Phase
    op: Op
    axis: str
    dtype: str


def summarize(ledgers: Mapping[int, Ledger]) -> tuple[LedgerLine, ...]:
    """Count collectives and bytes of each rank by phase, op, axis and dtype.

    Rank 0 is always listed. Another rank is listed only if its lines differ from rank 0's, so a rank that is not listed
    did the same as rank 0. A rank that differs by having no entry at all has one line with the count 0.
    """
    if not ledgers:
        return ()
    counted = {rank: Counter(map(_kind, ledger)) for rank, ledger in ledgers.items()}
    sized = {rank: _size(ledger) for rank, ledger in ledgers.items()}
    shown = [r for r in ledgers if r == 0 or (counted[r], sized[r]) != (counted[0], sized[0])]
    return tuple(line for rank in shown for line in _lines(rank, counted[rank], sized[rank]))


def _size(ledger: Ledger) -> Counter[_Kind]:
    sizes: Counter[_Kind] = Counter()
    for entry in ledger:
        sizes[_kind(entry)] += entry.num_bytes
    return sizes


def _kind(entry: Entry) -> _Kind:
    # Groups off the mesh have no axis; their size can be compared between ranks.
    axis = entry.axis or f"{len(entry.group)} ranks"
    return _Kind(phase=entry.phase, op=entry.op, axis=axis, dtype=entry.dtype)


def _lines(rank: int, counts: Counter[_Kind], sizes: Counter[_Kind]) -> list[LedgerLine]:
    if not counts and rank > 0:
        return [LedgerLine(rank=rank, phase="", op="none", axis="", dtype="", count=0, num_bytes=0)]
    return [
        LedgerLine(
            rank=rank,
            phase=kind.phase.value,
            op=kind.op.value,
            axis=kind.axis,
            dtype=kind.dtype,
            count=counts[kind],
            num_bytes=sizes[kind],
        )
        for kind in sorted(counts, key=_order)
    ]


def _order(kind: _Kind) -> tuple[int, int, str, str]:
    return (_PHASES.index(kind.phase), _OPS.index(kind.op), kind.axis, kind.dtype)
