"""Laws on communication during compute: which collectives overlap, and how far ahead units are gathered.

[Note: overlap] A collective overlaps if it is issued before a unit begins to compute, and the compute stream waits for
it after that unit is done: the network and the device can then work concurrently. A collective is exposed if no unit's
compute lies between the two. Both are orders of events on the host, not times: an engine on a device may hide more,
because its host runs ahead, and hides no less unless collectives are slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardproof.harness.cases.training import Watch
from shardproof.harness.cases.units import ROOT, UnitParameters, groups_of
from shardproof.harness.laws.communication.bounds import (
    Amount,
    Bound,
    at,
    blindness,
    evaluate,
    ledgers,
    pick,
    when,
)
from shardproof.harness.laws.communication.order import group_of, mistakable, spell_unit
from shardproof.harness.laws.communication.select import LoopStep, Per, Select
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.records.observation import Observation
from shardproof.harness.tracing.events import (
    ComputeSpan,
    EventKind,
    InFlight,
    TraceEvent,
    collectives_in_flight,
    compute_spans,
)
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase

_NO_EVENTS = "expected to see units compute, got no events"
_NO_WATCH = "expected a watch over streams, got none; try watch=frozenset({Watch.RACES})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlaps:
    """Each selected collective is in flight while some unit computes, except those of the named units.

    Compute of the root does not count, because it lies between units. The training must watch streams
    (``Watch.RACES``): a call that blocks its own stream does not block the one on which units compute.
    """

    select: Select
    but_for: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        free = f" but for {', '.join(map(spell_unit, self.but_for))}" if self.but_for else ""
        return f"{self.select} overlaps compute{free}"

    def judge(self, evidence: Evidence) -> Ruling:
        groups = groups_of(evidence.training)
        broken = [*blindness(evidence, (self.select,), Per.MICROBATCH), *mistakable(groups, evidence)]
        if Watch.RACES not in evidence.training.watch:
            broken.append(_NO_WATCH)
        num_exposed, num_seen = 0, 0
        for observation in evidence.ranks if evidence.world_size > 1 else ():
            picked = pick(self.select, observation.ledger, evidence)
            if not picked:
                broken.append(f"rank {observation.rank}: expected {self.select}, got none")
            if not observation.events:
                broken.append(f"rank {observation.rank}: {_NO_EVENTS}")
            spans = [s for s in compute_spans(observation.events) if s.unit != ROOT]
            hidden = _hidden(observation, spans)
            exposed = [entry for entry in picked if entry.seq not in hidden]
            num_seen, num_exposed = num_seen + len(picked), num_exposed + len(exposed)
            for entry in exposed:
                unit = _named(group_of(entry, groups, evidence.world_size))
                if unit not in self.but_for:
                    broken.append(
                        f"rank {observation.rank} {when(entry)}: expected a unit to compute between the issue of "
                        f"{entry.op} for {spell_unit(unit)} and the wait for it, got none: {entry.describe()}"
                    )
        held = (
            f"{num_seen - num_exposed} of {num_seen} in flight while a unit computes, on all ranks together"
        )
        return rule(self.name, broken, held=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapsBackward:
    """In each step a selected collective is in flight while a unit computes its backward, or none is.

    ``is_expected`` says which. The number in flight depends on the sizes of buckets. Compute of the root does not
    count, and the training must watch streams, as for `Overlaps`.
    """

    select: Select
    is_expected: bool

    @property
    def name(self) -> str:
        return f"{self.select} {'overlaps' if self.is_expected else 'never overlaps'} backward"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = blindness(evidence, (self.select,), Per.STEP)
        if Watch.RACES not in evidence.training.watch:
            broken.append(_NO_WATCH)
        num_hidden, num_seen = 0, 0
        for observation in evidence.ranks if evidence.world_size > 1 else ():
            picked = pick(self.select, observation.ledger, evidence)
            spans = [s for s in compute_spans(observation.events) if s.unit != ROOT and s.is_backward]
            if not spans:
                broken.append(f"rank {observation.rank}: {_NO_EVENTS}")
            hidden = _hidden(observation, spans)
            num_seen += len(picked)
            num_hidden += sum(entry.seq in hidden for entry in picked)
            for moment in self.select.moments(evidence.training.schedule, Per.STEP):
                found = at(moment, picked)
                wrong = self._breach(found, [entry for entry in found if entry.seq in hidden])
                broken += [f"rank {observation.rank} {moment}: {wrong}"] if wrong else []
        held = f"{num_hidden} of {num_seen} in flight while a unit computes backward, on all ranks together"
        return rule(self.name, broken, held=held)

    def _breach(self, found: Sequence[Entry], hidden: Sequence[Entry]) -> str:
        if not found:
            return f"expected {self.select}, got none"
        if self.is_expected and not hidden:
            return (
                f"expected one of {len(found)} to be in flight while a unit computes its backward, got none; "
                f"the first is {found[0].describe()}"
            )
        if hidden and not self.is_expected:
            return (
                f"expected none in flight while a unit computes its backward, got {len(hidden)}, the first of them "
                f"{hidden[0].describe()}"
            )
        return ""


def _hidden(observation: Observation, spans: Sequence[ComputeSpan]) -> set[int]:
    """Return the numbers of the collectives in flight during one of these spans."""
    return {
        in_flight.seq
        for in_flight in collectives_in_flight(observation.events)
        if _is_hidden(in_flight, spans)
    }


def _is_hidden(in_flight: InFlight, spans: Sequence[ComputeSpan]) -> bool:
    # A collective that is never waited for is in flight to the end; another law covers it.
    return any(
        in_flight.issued < span.first and (in_flight.landed is None or span.last <= in_flight.landed)
        for span in spans
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchDistance:
    """When a unit begins to compute, exactly this many of the next units are gathered or being gathered.

    ``phase`` is FORWARD or BACKWARD. At the end, where fewer units are left, all of them are. Gathers of the root at
    the time it begins are not checked, because no list covers it.
    """

    phase: Phase
    units: Bound

    @property
    def name(self) -> str:
        return f"{self.units} unit(s) gathered ahead in {self.phase}"

    @property
    def _select(self) -> Select:
        return Select(ops=(Op.ALL_GATHER,), phases=(self.phase,))

    def judge(self, evidence: Evidence) -> Ruling:
        groups = groups_of(evidence.training)
        moments = self._select.moments(evidence.training.schedule, Per.MICROBATCH)
        broken = [*blindness(evidence, (self._select,), Per.MICROBATCH), *mistakable(groups, evidence)]
        most = 0
        for observation in evidence.ranks if evidence.world_size > 1 else ():
            for moment in moments:
                turns = list(_turns(observation, moment, self.phase, groups, evidence))
                if all(turn.unit == ROOT for turn in turns):
                    broken.append(f"rank {observation.rank} {moment}: {_NO_EVENTS} of any that was gathered")
                most = max([most, *(len(turn.ahead) for turn in turns)])
                broken += [
                    f"rank {observation.rank} {moment}: {text}" for text in self._breaches(turns, evidence)
                ]
        return rule(self.name, broken, held=f"up to {most} ahead, each the next to compute, on every rank")

    def _breaches(self, turns: Sequence[_Turn], evidence: Evidence) -> Iterator[str]:
        order = [turn.unit for turn in turns]
        for position, turn in enumerate(turns):
            left = order[position + 1 :]
            if turn.unit == ROOT:
                continue
            got = len(turn.ahead)
            is_all = got == len(left) and any(
                self.units.allows(n, evidence.training, evidence.world_size)
                for n in range(got, len(order) + 1)
            )
            is_enough = is_all or self.units.allows(got, evidence.training, evidence.world_size)
            if not is_enough or set(turn.ahead) != set(left[:got]):
                wanted = self.units.spell(evidence.training, evidence.world_size)
                yield (
                    f"expected {wanted} of {_list(left)} to be gathered when {spell_unit(turn.unit)} computes, "
                    f"got {_list(turn.ahead)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A unit's first compute in a phase; ``ahead`` are the units that are gathered but have not begun."""

    unit: str
    ahead: tuple[str, ...]


def _turns(
    observation: Observation,
    moment: LoopStep,
    phase: Phase,
    groups: Sequence[UnitParameters],
    evidence: Evidence,
) -> Iterator[_Turn]:
    """Yield the turns of units gathered in that phase, in order; a joint unit begins with its first module."""
    carried = {
        e.seq: _named(group_of(e, groups, evidence.world_size))
        for e in observation.ledger
        if e.op is Op.ALL_GATHER and e.phase is phase and moment.holds(e)
    }
    unit_with = {name: group.unit for group in groups for name in group.unit.split(",")}
    begins = EventKind.COMPUTES if phase is Phase.FORWARD else EventKind.BACKWARD_STARTED
    gathered: dict[str, None] = {}
    begun: set[str] = set()
    for event in observation.events:
        if event.what is EventKind.ISSUED and event.seq in carried:
            gathered[carried[event.seq]] = None
        elif _begins(event, begins, moment, phase):
            unit = unit_with.get(event.unit or "")
            if unit is not None and unit in carried.values() and unit not in begun:
                begun.add(unit)
                yield _Turn(unit=unit, ahead=tuple(u for u in gathered if u not in begun))


def _begins(event: TraceEvent, what: EventKind, moment: LoopStep, phase: Phase) -> bool:
    return event.what is what and event.phase is phase and moment.holds(event)


def _named(group: UnitParameters | None) -> str:
    return "what no unit is the size of" if group is None else group.unit


def _list(units: Sequence[str]) -> str:
    return ", ".join(map(spell_unit, units)) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMostInFlight:
    """When a selected collective is issued, at most this many of them, itself included, are not waited for yet.

    A blocking collective is waited for at once. A rank holds the buffers of a collective at least until the wait.
    """

    select: Select
    at_most: Amount

    @property
    def name(self) -> str:
        limit = self.at_most if isinstance(self.at_most, int) else self.at_most.name
        return f"at most {limit} x {self.select} in flight"

    def judge(self, evidence: Evidence) -> Ruling:
        limit = evaluate(self.at_most, evidence.training, evidence.world_size)
        broken = blindness(evidence, (self.select,), Per.STEP)
        most = 0
        for rank, ledger in ledgers(evidence):
            picked = pick(self.select, ledger, evidence)
            if not picked and evidence.world_size > 1:
                broken.append(f"rank {rank}: expected {self.select}, got none")
            for entry, count in _counts(picked):
                most = max(most, count)
                if count > limit:
                    text = f"expected at most {limit} in flight, got {count}, the last of them"
                    broken.append(f"rank {rank} {when(entry)}: {text} {entry.describe()}")
        return rule(self.name, broken, held=f"at most {most} on every rank")


def _counts(picked: Ledger) -> Iterator[tuple[Entry, int]]:
    for position, entry in enumerate(picked):
        yield entry, sum(_is_under_way(e, entry.seq) for e in picked[: position + 1])


def _is_under_way(entry: Entry, seq: int) -> bool:
    """Return whether ``entry`` was issued but not waited for when call ``seq`` was made."""
    wait = entry.wait
    # A ledger without wait times proves no bound.
    return wait is None or wait.num_issued is None or wait.num_issued > seq
