"""Laws over the turns of units: who is whole while another unit computes, and whose gather goes before a reduction.

[Note: turns] What is right follows from plan and events alone. In forward a unit's turn lasts from its call until it
has returned, in backward from the gradient of its output, or a recomputation of it, until the gradients of its inputs
are there. Without such gradients nothing shows the end, and the turn lasts until backward is over. The turn of a joint
unit ends with that of the last of its modules. The root's turn is the whole forward, and the whole backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from shardproof.engine.contract import Capability, Layout, Plan, Reshard
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.units import ROOT, groups_of, num_shares_of
from shardproof.harness.laws.communication.order import group_of, mistakable, spell_unit
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.tracing.events import EventKind, EventLog, TraceEvent
from shardproof.harness.tracing.ledger import Ledger, Op, Phase

_STARTS = {EventKind.ENTERED, EventKind.BACKWARD_ENTERED}
_ENDS = {Phase.FORWARD: EventKind.LEFT, Phase.BACKWARD: EventKind.BACKWARD_ENDED}
# While a unit computes, and when a phase is over, the engine's own hooks are through.
_SETTLED = {EventKind.COMPUTES, EventKind.BACKWARD_STARTED, EventKind.ENDED}
_REDUCING = {Op.REDUCE_SCATTER, Op.ALL_REDUCE}


def _passes(events: EventLog) -> Iterator[EventLog]:
    """Yield the events of each forward and of each backward, with what happened since the one before."""
    first = 0
    for at, event in enumerate(events):
        if event.what is EventKind.ENDED and event.phase in _ENDS:
            yield events[first : at + 1]
            first = at + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeInTurn:
    """After each event only those units are whole whose turn it is or comes next, and those that the policy keeps.

    Those whose turn it is are so from the start of their turn to its end: no unit is gathered twice in one turn.

    Next are as many as the plan's longest prefetch list names, by default one. A kept unit is whole from its turn in
    forward until backward is over, and after backward only if the loop asks for it. A forward that fails leaves those
    whole whose turn it was. See [Note: turns]; units are watched in engines that show their state.
    """

    name: str = "units are whole in their turn alone"

    def judge(self, evidence: Evidence) -> Ruling:
        broken: list[str] = []
        num_moments = 0
        for observation in evidence.ranks:
            whole: set[str] = set()
            is_seen = False
            for events in _passes(observation.events):
                turns = _Turns(events, evidence.training.at(events[-1].step))
                broken += [
                    f"rank {observation.rank}, {_spell(event)}: expected whole until its turn ends, got gathered again"
                    for event in turns.again()
                ]
                for at, event in enumerate(events):
                    if event.what is EventKind.UNSHARDED:
                        whole.add(event.unit or ROOT)
                        is_seen = True
                    elif event.what is EventKind.RESHARDED:
                        whole.discard(event.unit or ROOT)
                    elif event.what in _SETTLED and event.phase in _ENDS and turns.has(event, at):
                        num_moments += 1
                        if surplus := whole - turns.allowed(at):
                            broken.append(f"rank {observation.rank}, {_spell(event)}: {_whole(surplus)}")
            if not is_seen and num_shares_of(evidence.training.plan, evidence.world_size) > 1:
                broken.append(f"rank {observation.rank}: expected some unit whole at some time, saw none")
        return rule(self.name, broken, held=f"at {num_moments} moments on {evidence.world_size} ranks")


def _whole(units: set[str]) -> str:
    return f"expected sharded, got whole: {', '.join(sorted(map(spell_unit, units)))}"


def _spell(event: TraceEvent) -> str:
    what = "at the end" if event.unit is None else f"while {spell_unit(event.unit)} computes"
    return f"step {event.step} microbatch {event.microbatch} {event.phase} {what}"


class _Turns:
    """The turns of one forward or backward, as half-open ranges of its events; see [Note: turns]."""

    def __init__(self, events: EventLog, training: Training) -> None:
        self._plan = plan = training.plan
        self._events, self._length = events, len(events)
        self._phase, step, microbatch = events[-1].phase, events[-1].step, events[-1].microbatch
        self._is_last = microbatch == training.schedule.microbatches_in(max(step, 0)) - 1
        self._turns: list[tuple[str, range]] = []
        pending: dict[str, tuple[int, set[str]]] = {}
        self._units = units = _unit_of_module(plan)
        for at, event in enumerate(events):
            unit = units.get(event.unit or ROOT)
            if unit is None or event.unit is None:
                continue
            if event.what in _STARTS:
                pending.setdefault(unit, (at, set(unit.split(","))))
            elif event.what is _ENDS[self._phase] and unit in pending:
                start, members = pending[unit]
                members.discard(event.unit)
                if not members:
                    self._turns.append((unit, range(start, at)))
                    del pending[unit]
        self._turns += [(unit, range(start, self._length)) for unit, (start, _) in pending.items()]
        # Only a forward is sure to end what it begins; and the root's turn is all of it.
        ends = [e.what for e in events if e.unit == ROOT and e.what in {EventKind.ENTERED, EventKind.LEFT}]
        fails = self._phase is Phase.FORWARD and ends[-1:] == [EventKind.ENTERED]
        self._cut_short = {ROOT, *pending} if fails else set()
        self._turns.sort(key=lambda turn: turn[1].start)

    def has(self, event: TraceEvent, at: int) -> bool:
        """Return whether it is its unit's turn; not if the unit's input, which it also returns, gets its gradient."""
        unit = self._units.get(event.unit or ROOT)
        return unit is None or any(at in turn for name, turn in self._turns if name == unit)

    def again(self) -> Iterator[TraceEvent]:
        """Yield the gathers of a unit that was freed since its turn began, if its modules run once each in it."""
        for unit, turn in self._turns:
            during = self._events[turn.start : turn.stop]
            starts = [e.unit for e in during if e.what in _STARTS and self._units.get(e.unit or ROOT) == unit]
            freed = False
            for event in during if len(set(starts)) == len(starts) else ():
                is_own = (event.unit or ROOT) == unit
                if freed and is_own and event.what is EventKind.UNSHARDED:
                    yield event
                freed = freed or (is_own and event.what is EventKind.RESHARDED)

    def allowed(self, at: int) -> set[str]:
        """Return the units that may be whole at an event."""
        is_over = at == self._length - 1
        present = self._cut_short if is_over else {ROOT, *(unit for unit, turn in self._turns if at in turn)}
        later = (unit for unit, turn in self._turns if turn.start > at)
        ahead = dict.fromkeys(unit for unit in later if unit not in present)
        return {*present, *list(ahead)[: _num_ahead(self._plan)], *self._kept(is_over=is_over)}

    def _kept(self, *, is_over: bool) -> set[str]:
        plan = self._plan
        is_through = is_over and self._phase is Phase.BACKWARD
        stays = Capability.KEEP_AFTER_BACKWARD in plan.needs and not (is_through and self._is_last)
        if stays or plan.layout is Layout.REPLICATE or (plan.reshard is Reshard.KEEP and not is_through):
            return {*plan.units, ROOT}
        is_root_kept = plan.reshard is Reshard.NATIVE and not is_through
        return {*plan.replicated, *([ROOT] if is_root_kept else [])}


def _unit_of_module(plan: Plan) -> Mapping[str, str]:
    """Map each module of a plan's units to its unit: a joint unit has several."""
    return {member: unit for unit in plan.units for member in unit.split(",")}


def _num_ahead(plan: Plan) -> int:
    lists = () if plan.prefetch is None else (*plan.prefetch.forward, *plan.prefetch.backward)
    return max((len(targets) for _, targets in lists), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GathersGoFirst:
    """In backward no unit is gathered after the reduction of the unit before it: the gather would wait for that.

    It may be late if another unit was gathered ahead and still waits for its turn, because an engine may have expected
    that one. See [Note: turns]; sizes identify units, as for `Order`.
    """

    name: str = "in backward the next gather goes before the reduction"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = [*mistakable(groups_of(evidence.training), evidence)]
        num_gathers = 0
        for observation in evidence.ranks:
            gathered, reducing = _gathered(observation.ledger, evidence), _seqs(observation.ledger, _REDUCING)
            for events in _passes(observation.events):
                if events[-1].phase is Phase.BACKWARD:
                    schedule = _Schedule(gathered, reducing, _unit_of_module(evidence.training.plan))
                    late = [event for event in events if schedule.is_late(event)]
                    num_gathers += schedule.num_gathers
                    broken += [
                        f"rank {observation.rank}, step {event.step} microbatch {event.microbatch}: expected the "
                        f"gather of {spell_unit(gathered[event.seq])} before the reduction of the unit before it, "
                        "got it after"
                        for event in late
                        if event.seq is not None
                    ]
        if not num_gathers and evidence.world_size > 1:
            broken.append("expected gathers in backward, got none: nothing was observed")
        return rule(self.name, broken, held=f"{num_gathers} gathers on {evidence.world_size} ranks")


def _gathered(ledger: Ledger, evidence: Evidence) -> Mapping[int, str]:
    """Return the unit of each gather, by its number."""
    groups = groups_of(evidence.training)
    found = (
        (seq, group_of(ledger[seq], groups, evidence.world_size)) for seq in _seqs(ledger, {Op.ALL_GATHER})
    )
    return {seq: group.unit for seq, group in found if group is not None}


def _seqs(ledger: Ledger, ops: Set[Op]) -> Set[int]:
    return {entry.seq for entry in ledger if entry.op in ops}


class _Schedule:
    """Reads the events of one backward in order."""

    def __init__(self, gathered: Mapping[int, str], reducing: Set[int], units: Mapping[str, str]) -> None:
        self.num_gathers = 0
        self._gathered = gathered
        self._reducing = reducing
        self._units = units
        self._turn = ""
        self._ahead: set[str] = set()
        self._reduces = False  # whether gradients were reduced since the present turn began
        self._reduced = False  # likewise in the turn before

    def is_late(self, event: TraceEvent) -> bool:
        """Take one event; return whether it is a gather that should have come earlier."""
        if event.what in _STARTS and event.unit is not None:
            self._begin(self._units.get(event.unit, ROOT))
        if event.what is not EventKind.ISSUED or event.seq is None:
            return False
        self._reduces |= event.seq in self._reducing
        if event.seq not in self._gathered:
            return False
        self.num_gathers += 1
        unit = self._gathered[event.seq]
        is_own = unit == self._turn
        is_late = not self._ahead and (self._reduces or (is_own and self._reduced))
        if not is_own and unit != ROOT:
            self._ahead.add(unit)
        return is_late

    def _begin(self, unit: str) -> None:
        if unit != self._turn:
            self._turn, self._reduced, self._reduces = unit, self._reduces, False
        self._ahead.discard(unit)
