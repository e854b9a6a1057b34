"""The law that units are gathered and reduced in the order named; whose parameters a call carries, its size tells.

[Note: whose parameters] Engines say nothing of what they send. In a model whose units all have different sizes the
number of bytes tells the unit, whether or not an engine pads rows to the number of ranks or aligns parameters. A
model in which two units could be mistaken for each other proves nothing about order, and breaks the law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from harness.groups import ROOT, Group, groups_of
from harness.law import Evidence, Ruling, rule
from harness.ledger.entry import Entry, Op
from harness.ledger.ruling import at, blindness, ledgers, pick
from harness.ledger.selection import Per, Select

__all__ = ["Computes", "Event", "Gathers", "Order", "Reduces"]

_ALIGNED_BYTES = 16  # as far as engines are known to align each parameter in a buffer


@dataclass(frozen=True, slots=True)  # positional: `Gathers("blocks.0")` reads aloud
class Gathers:
    """The parameters of a unit are gathered; ``during`` whose forward or backward, if that matters."""

    unit: str
    during: str | None = None

    def __str__(self) -> str:
        during = "" if self.during is None else f" during {_spell(self.during)}"
        return f"gather {_spell(self.unit)}{during}"


@dataclass(frozen=True, slots=True)  # positional: as above
class Reduces:
    """The gradients of a unit are reduced."""

    unit: str

    def __str__(self) -> str:
        return f"reduce {_spell(self.unit)}"


@dataclass(frozen=True, slots=True)  # positional: as above
class Computes:
    """The gradients of a unit are about to be computed: the unit's own module broadcasts to tell so."""

    unit: str

    def __str__(self) -> str:
        return f"compute gradients of {_spell(self.unit)}"


Event = Gathers | Reduces | Computes


_KINDS: Mapping[Op, type[Event]] = {
    Op.ALL_GATHER: Gathers,
    Op.REDUCE_SCATTER: Reduces,
    Op.ALL_REDUCE: Reduces,
    Op.BROADCAST: Computes,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In each microbatch these gathers and reductions are issued, in this order, and no others.

    Where no event is a reduction, reductions are left out of account, and so are gathers, and the broadcasts by
    which modules tell what they compute; ``select`` narrows further. Sizes identify units, so the parameters must
    travel in the dtype in which the model was built.
    """

    select: Select
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if not self.events:
            raise ValueError("Order.events: expected some event, got none; try Nothing")

    @property
    def name(self) -> str:
        """Say the law."""
        return f"{', '.join(map(str, self.events))} among {self.select}"

    def judge(self, evidence: Evidence) -> Ruling:
        """Tell what each rank issued in each microbatch, and compare."""
        groups = groups_of(evidence.training)
        moments = self.select.moments(evidence.training.schedule, Per.MICROBATCH)
        broken = [*blindness(evidence, (self.select,), Per.MICROBATCH), *_mistakable(groups, evidence)]
        for rank, ledger in ledgers(evidence):
            picked = tuple(e for e in pick(self.select, ledger, evidence) if self._is_asked(e))
            for moment in moments if evidence.world_size > 1 else ():
                told = [_event(e, groups, evidence.world_size) for e in at(moment, picked)]
                broken += [f"rank {rank} {moment}: {text}" for text in self._disorder(told)]
        return rule(self.name, broken, held=f"in order on every rank in {len(moments)} microbatches")

    def _is_asked(self, entry: Entry) -> bool:
        kind = _KINDS.get(entry.op)
        return kind is not None and any(isinstance(event, kind) for event in self.events)

    def _disorder(self, told: Sequence[Event | str]) -> Iterator[str]:
        for position, (wanted, got) in enumerate(zip_longest(self.events, told)):
            if not _is_met(wanted, got):
                found = ", ".join(map(str, told)) or "nothing"
                yield f"expected {wanted or 'no more'} as #{position}, got {got or 'no more'}; in all {found}"
                return


def _is_met(wanted: Event | None, got: Event | str | None) -> bool:
    if isinstance(wanted, Gathers) and isinstance(got, Gathers) and wanted.during is None:
        return wanted.unit == got.unit
    return wanted == got


def _event(entry: Entry, groups: Sequence[Group], num_ranks: int) -> Event | str:
    """Tell whose parameters an entry carries; a text where no unit is of that size."""
    if entry.op is Op.BROADCAST and entry.unit is not None:
        return Computes(entry.unit)
    # A replica's part of the gradients is reduced across replicas: as many times smaller as it has ranks.
    share = num_ranks // len(entry.group) if entry.op is Op.ALL_REDUCE else 1
    for group in groups:
        if group.num_bytes <= entry.num_bytes * share <= _most_bytes(group, num_ranks):
            return Gathers(group.unit, entry.unit) if entry.op is Op.ALL_GATHER else Reduces(group.unit)
    return f"{entry.op} of {entry.num_bytes} bytes, which no unit has"


def _mistakable(groups: Sequence[Group], evidence: Evidence) -> Iterator[str]:
    """See [Note: whose parameters]."""
    for one, other in combinations(sorted(groups, key=lambda g: g.num_bytes), 2):
        if _most_bytes(one, evidence.world_size) >= other.num_bytes:
            yield (
                f"expected units of different sizes, got {_spell(one.unit)} and {_spell(other.unit)}, which "
                f"{evidence.world_size} ranks cannot tell apart; try other widths"
            )


def _most_bytes(group: Group, num_ranks: int) -> int:
    return group.padded_bytes(num_ranks) + len(group.shapes) * (_ALIGNED_BYTES - group.bytes_per_element)


def _spell(unit: str) -> str:
    return "the root" if unit == ROOT else unit
