"""Whose parameters a collective carries: its size tells.

[Note: whose parameters] Engines say nothing of what they send. In a model whose units all have different sizes the
number of bytes tells the unit, whether or not an engine pads rows to the number of ranks or aligns parameters. A
model in which two units could be mistaken for each other proves nothing about order, and breaks the law.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from harness.cases.units import ROOT, Group
from harness.laws.law import Evidence
from harness.tracing.ledger import Entry, Op

__all__ = ["group_of", "mistakable", "spell_unit"]

_ALIGNED_BYTES = 16  # as far as engines are known to align each parameter in a buffer


def group_of(entry: Entry, groups: Sequence[Group], num_ranks: int) -> Group | None:
    """Give the group whose parameters or gradients an entry carries; None where none or several are of that size."""
    # A replica's part of the gradients is reduced across replicas: as many times smaller as it has ranks.
    share = num_ranks // len(entry.group) if entry.op is Op.ALL_REDUCE else 1
    size = entry.num_bytes * share
    found = [group for group in groups if group.num_bytes <= size <= _most_bytes(group, num_ranks)]
    return found[0] if len(found) == 1 else None


def mistakable(groups: Sequence[Group], evidence: Evidence) -> Iterator[str]:
    """Tell which units could be mistaken for each other; see [Note: whose parameters]."""
    for one, other in combinations(sorted(groups, key=lambda g: g.num_bytes), 2):
        if _most_bytes(one, evidence.world_size) >= other.num_bytes:
            yield (
                f"expected units of different sizes, got {spell_unit(one.unit)} and {spell_unit(other.unit)}, which "
                f"{evidence.world_size} ranks cannot tell apart; try other widths"
            )


def spell_unit(unit: str) -> str:
    """Spell a unit for a person."""
    return "the root" if unit == ROOT else unit


def _most_bytes(group: Group, num_ranks: int) -> int:
    return group.padded_bytes(num_ranks) + len(group.shapes) * (_ALIGNED_BYTES - group.bytes_per_element)
