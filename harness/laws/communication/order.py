"""The law that units are gathered, freed and reduced in a given order; a collective's size identifies its unit.

[Note: whose parameters] Engines do not report what they send. In a model whose units all have different sizes the
number of bytes identifies the unit, even if an engine pads rows to the number of ranks or aligns parameters. A model
with two units that cannot be distinguished proves nothing about order, and breaks the law.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from shardproof.harness.cases.units import FLAT_ALIGNMENT_BYTES, ROOT, UnitParameters, groups_of
from shardproof.harness.laws.communication.bounds import blindness, pick
from shardproof.harness.laws.communication.select import Per, Select
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.records.observation import Observation
from shardproof.harness.tracing.events import EventKind, TraceEvent
from shardproof.harness.tracing.ledger import Entry, Op


def group_of(entry: Entry, groups: Sequence[UnitParameters], num_ranks: int) -> UnitParameters | None:
    """Return the group whose parameters or gradients an entry carries; None where zero or several have that size."""
    # An all-reduce across replicas carries one shard of the gradients, so it is smaller by the size of a replica.
    share = num_ranks // len(entry.group) if entry.op is Op.ALL_REDUCE else 1
    size = entry.num_bytes * share
    found = [group for group in groups if group.num_bytes <= size <= _most_bytes(group, num_ranks)]
    return found[0] if len(found) == 1 else None


def mistakable(groups: Sequence[UnitParameters], evidence: Evidence) -> Iterator[str]:
    """Yield the units that cannot be distinguished; see [Note: whose parameters]."""
    for one, other in combinations(sorted(groups, key=lambda g: g.num_bytes), 2):
        if _most_bytes(one, evidence.world_size) >= other.num_bytes:
            yield (
                f"expected units of different sizes, got {spell_unit(one.unit)} and {spell_unit(other.unit)}, which "
                f"{evidence.world_size} ranks cannot distinguish; try other widths"
            )


def spell_unit(unit: str) -> str:
    """Format a unit for messages."""
    return "the root" if unit == ROOT else unit


def _most_bytes(group: UnitParameters, num_ranks: int) -> int:
    return group.padded_bytes(num_ranks) + len(group.shapes) * (
        FLAT_ALIGNMENT_BYTES - group.bytes_per_element
    )


@dataclass(frozen=True, slots=True)  # positional: `Gathers("blocks.0")` reads aloud
class Gathers:
    """The parameters of a unit are gathered; ``during`` names the forward or backward, if that matters."""

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
    """The gradients of a unit are about to be computed: the unit's own module broadcasts to show it."""

    unit: str

    def __str__(self) -> str:
        return f"compute gradients of {spell_unit(self.unit)}"


@dataclass(frozen=True, slots=True)  # positional: as above
class Reshards:
    """A unit is sharded again, as its modules show; the training must watch units (``Watch.UNITS``)."""

    unit: str

    def __str__(self) -> str:
        return f"free {spell_unit(self.unit)}"


Event = Gathers | Reduces | Computes | Reshards


@dataclass(frozen=True, slots=True)  # positional: as above
class Together:
    """These events happen next to each other, in any order."""

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
    """In each microbatch exactly these gathers, frees and reductions happen, in this order.

    Where no event is a reduction, reductions are ignored. The same holds for gathers, frees, and the broadcasts by
    which modules show what they compute. ``select`` narrows further, but frees by phase and moment only. Sizes identify
    units, so the parameters must be communicated in the dtype in which the model was built.
    """

    select: Select
    events: tuple[Event | Together, ...]

    def __post_init__(self) -> None:
        if not self.events:
            raise ValueError("Order.events: expected some event, got none; try Nothing")

    @property
    def name(self) -> str:
        return f"{', '.join(map(str, self.events))} among {self.select}"

    def judge(self, evidence: Evidence) -> Ruling:
        groups = groups_of(evidence.training)
        moments = self.select.moments(evidence.training.schedule, Per.MICROBATCH)
        broken = [*blindness(evidence, (self.select,), Per.MICROBATCH), *mistakable(groups, evidence)]
        for observation in evidence.ranks:
            happened = self._happened(observation, evidence)
            for moment in moments if evidence.world_size > 1 else ():
                observed = [_event(h, groups, evidence.world_size) for h in happened if moment.holds(h)]
                broken += [f"rank {observation.rank} {moment}: {text}" for text in self._disorder(observed)]
        return rule(self.name, broken, held=f"in order on every rank in {len(moments)} microbatches")

    def _happened(self, observation: Observation, evidence: Evidence) -> Sequence[Entry | TraceEvent]:
        """Return the events to put in order; without events, which alone show frees, the calls."""
        picked = [e for e in pick(self.select, observation.ledger, evidence) if self._is_asked(e)]
        if not self._asks_for(Reshards):
            return picked
        by_seq: dict[int | None, Entry] = {entry.seq: entry for entry in picked}
        return [
            event if event.what is EventKind.RESHARDED else by_seq[event.seq]
            for event in observation.events
            if (event.what is EventKind.RESHARDED and self._covers(event))
            or (event.what is EventKind.ISSUED and event.seq in by_seq)
        ]

    def _covers(self, event: TraceEvent) -> bool:
        return not self.select.phases or event.phase in self.select.phases

    def _is_asked(self, entry: Entry) -> bool:
        kind = _KINDS.get(entry.op)
        return kind is not None and self._asks_for(kind)

    def _asks_for(self, kind: type[Event]) -> bool:
        asked = (one for event in self.events for one in _each(event))
        return any(isinstance(event, kind) for event in asked)

    def _disorder(self, observed: Sequence[Event | str]) -> Iterator[str]:
        settled = list(_settled(self.events, observed))
        for position, (wanted, got) in enumerate(zip_longest(settled, observed)):
            if not _is_met(wanted, got):
                found = ", ".join(map(str, observed)) or "nothing"
                yield f"expected {wanted or 'no more'} as #{position}, got {got or 'no more'}; in all {found}"
                return


def _each(event: Event | Together) -> Iterable[Event]:
    return event.events if isinstance(event, Together) else (event,)


def _settled(events: Sequence[Event | Together], observed: Sequence[Event | str]) -> Iterator[Event]:
    """Put events of any order into the order in which they happened, as far as they did."""
    position = 0
    for event in events:
        members = sorted(_each(event), key=str)
        came = observed[position : position + len(members)]
        members.sort(key=lambda m: next((i for i, got in enumerate(came) if _is_met(m, got)), len(came)))
        yield from members
        position += len(members)


def _is_met(wanted: Event | None, got: Event | str | None) -> bool:
    if isinstance(wanted, Gathers) and isinstance(got, Gathers) and wanted.during is None:
        return wanted.unit == got.unit
    return wanted == got


def _event(happened: Entry | TraceEvent, groups: Sequence[UnitParameters], num_ranks: int) -> Event | str:
    """Return the unit of an event; a text where no unit has that size."""
    if isinstance(happened, TraceEvent):
        return Reshards(happened.unit or "")
    if happened.op is Op.BROADCAST and happened.unit is not None:
        return Computes(happened.unit)
    group = group_of(happened, groups, num_ranks)
    if group is None:
        return f"{happened.op} of {happened.num_bytes} bytes, which no unit has"
    return Gathers(group.unit, happened.unit) if happened.op is Op.ALL_GATHER else Reduces(group.unit)
