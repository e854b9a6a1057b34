"""The law that units are gathered, freed and reduced in the order named; see [Note: whose parameters]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from harness.cases.units import Group, groups_of
from harness.laws.communication.payloads import group_of, mistakable, spell_unit
from harness.laws.communication.ruling import blindness, pick
from harness.laws.communication.select import Per, Select
from harness.laws.law import Evidence, Ruling, rule
from harness.records.observation import Observation
from harness.tracing.events import EventKind, Mark
from harness.tracing.ledger import Entry, Op

__all__ = ["Computes", "Event", "Gathers", "Order", "Reduces", "Reshards", "Together"]


@dataclass(frozen=True, slots=True)  # positional: `Gathers("blocks.0")` reads aloud
class Gathers:
    """The parameters of a unit are gathered; ``during`` whose forward or backward, if that matters."""

    unit: str
    during: str | None = None

    def __str__(self) -> str:
        during = "" if self.during is None else f" during {spell_unit(self.during)}"
        return f"gather {spell_unit(self.unit)}{during}"


@dataclass(frozen=True, slots=True)  # positional: as above
class Reduces:
    """The gradients of a unit are reduced."""

    unit: str

    def __str__(self) -> str:
        return f"reduce {spell_unit(self.unit)}"


@dataclass(frozen=True, slots=True)  # positional: as above
class Computes:
    """The gradients of a unit are about to be computed: the unit's own module broadcasts to tell so."""

    unit: str

    def __str__(self) -> str:
        return f"compute gradients of {spell_unit(self.unit)}"


@dataclass(frozen=True, slots=True)  # positional: as above
class Reshards:
    """A unit is sharded again, as its modules show it; the training must watch units (``Watch.UNITS``)."""

    unit: str

    def __str__(self) -> str:
        return f"free {spell_unit(self.unit)}"


Event = Gathers | Reduces | Computes | Reshards


@dataclass(frozen=True, slots=True)  # positional: as above
class Together:
    """These events follow each other, whichever comes first."""

    events: frozenset[Event]

    def __str__(self) -> str:
        return " and ".join(sorted(map(str, self.events)))


_KINDS: Mapping[Op, type[Event]] = {
    Op.ALL_GATHER: Gathers,
    Op.REDUCE_SCATTER: Reduces,
    Op.ALL_REDUCE: Reduces,
    Op.BROADCAST: Computes,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In each microbatch these gathers, frees and reductions happen, in this order, and no others.

    Where no event is a reduction, reductions are left out of account, and so are gathers, frees, and the broadcasts
    by which modules tell what they compute; ``select`` narrows further, frees by phase and moment alone. Sizes
    identify units, so the parameters must travel in the dtype in which the model was built.
    """

    select: Select
    events: tuple[Event | Together, ...]

    def __post_init__(self) -> None:
        if not self.events:
            raise ValueError("Order.events: expected some event, got none; try Nothing")

    @property
    def name(self) -> str:
        """Say the law."""
        return f"{', '.join(map(str, self.events))} among {self.select}"

    def judge(self, evidence: Evidence) -> Ruling:
        """Tell what happened on each rank in each microbatch, and compare."""
        groups = groups_of(evidence.training)
        moments = self.select.moments(evidence.training.schedule, Per.MICROBATCH)
        broken = [*blindness(evidence, (self.select,), Per.MICROBATCH), *mistakable(groups, evidence)]
        for observation in evidence.ranks:
            happened = self._happened(observation, evidence)
            for moment in moments if evidence.world_size > 1 else ():
                told = [_event(h, groups, evidence.world_size) for h in happened if moment.holds(h)]
                broken += [f"rank {observation.rank} {moment}: {text}" for text in self._disorder(told)]
        return rule(self.name, broken, held=f"in order on every rank in {len(moments)} microbatches")

    def _happened(self, observation: Observation, evidence: Evidence) -> Sequence[Entry | Mark]:
        """Give what is asked for in order; without a course, which tells of frees alone, the calls by themselves."""
        picked = [e for e in pick(self.select, observation.ledger, evidence) if self._is_asked(e)]
        if not self._asks_for(Reshards):
            return picked
        by_seq: dict[int | None, Entry] = {entry.seq: entry for entry in picked}
        return [
            mark if mark.what is EventKind.RESHARDED else by_seq[mark.seq]
            for mark in observation.course
            if (mark.what is EventKind.RESHARDED and self._covers(mark))
            or (mark.what is EventKind.ISSUED and mark.seq in by_seq)
        ]

    def _covers(self, mark: Mark) -> bool:
        return not self.select.phases or mark.phase in self.select.phases

    def _is_asked(self, entry: Entry) -> bool:
        kind = _KINDS.get(entry.op)
        return kind is not None and self._asks_for(kind)

    def _asks_for(self, kind: type[Event]) -> bool:
        asked = (one for event in self.events for one in _each(event))
        return any(isinstance(event, kind) for event in asked)

    def _disorder(self, told: Sequence[Event | str]) -> Iterator[str]:
        settled = list(_settled(self.events, told))
        for position, (wanted, got) in enumerate(zip_longest(settled, told)):
            if not _is_met(wanted, got):
                found = ", ".join(map(str, told)) or "nothing"
                yield f"expected {wanted or 'no more'} as #{position}, got {got or 'no more'}; in all {found}"
                return


def _each(event: Event | Together) -> Iterable[Event]:
    return event.events if isinstance(event, Together) else (event,)


def _settled(events: Sequence[Event | Together], told: Sequence[Event | str]) -> Iterator[Event]:
    """Put what may come in any order into the order in which it came, as far as it did."""
    position = 0
    for event in events:
        members = sorted(_each(event), key=str)
        came = told[position : position + len(members)]
        members.sort(key=lambda m: next((i for i, got in enumerate(came) if _is_met(m, got)), len(came)))
        yield from members
        position += len(members)


def _is_met(wanted: Event | None, got: Event | str | None) -> bool:
    if isinstance(wanted, Gathers) and isinstance(got, Gathers) and wanted.during is None:
        return wanted.unit == got.unit
    return wanted == got


def _event(happened: Entry | Mark, groups: Sequence[Group], num_ranks: int) -> Event | str:
    """Tell whose parameters it is about; a text where no unit is of that size."""
    if isinstance(happened, Mark):
        return Reshards(happened.unit or "")
    if happened.op is Op.BROADCAST and happened.unit is not None:
        return Computes(happened.unit)
    group = group_of(happened, groups, num_ranks)
    if group is None:
        return f"{happened.op} of {happened.num_bytes} bytes, which no unit has"
    return Gathers(group.unit, happened.unit) if happened.op is Op.ALL_GATHER else Reduces(group.unit)
