"""Laws over the lifetimes of memory: live bytes after a phase, peaks, units unsharded in turn, user tensors.

[Note: a blind watch] A rank without a report breaks the law. So does a report without a step, or without the memory
that a law is about: it proves nothing.

[Note: what no rank owns] A gather is recognised by its input shares. If a rank owns nothing of a unit, for example one
element over seven ranks, its share is padding alone, which an engine may keep in memory that contains no parameter. The
watch may or may not see such a gather, and that many bytes may be missing on that rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from shardproof.harness.cases.units import groups_of
from shardproof.harness.laws.communication.bounds import Bound
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.memory.memory_report import (
    Allocation,
    LifetimeReport,
    LoopSpan,
    MemoryKind,
    MemorySnapshot,
    Turn,
    last_of,
    moments,
    spell_bytes,
    turns,
)

MOST_SITES = 4
"""How many lives are listed by where they were made: enough to see who makes them."""


def reports(evidence: Evidence, broken: list[str]) -> Iterator[tuple[int, LifetimeReport]]:
    """Yield each rank's report; see [Note: a blind watch]."""
    for observation in evidence.ranks:
        report = observation.lifetime_report
        if report is None or not report.lives or not report.stretches:
            broken.append(
                f"rank {observation.rank}: expected a watch over its memory, got none that saw any; "
                "try watch=frozenset({Watch.LIFETIMES})"
            )
        else:
            yield observation.rank, report


def made(life: Allocation) -> str:
    """Return the operator or call that allocated a piece of memory."""
    unit = "" if life.unit is None else f" of unit {life.unit!r}"
    return f"{life.num_bytes} bytes{unit} from {life.operator} at {life.site}"


class AfterPhase(Enum):
    """The phase after which memory is counted."""

    FORWARD = "each forward"
    BACKWARD = "each backward"
    STEP = "each step"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """The number of live bytes of these kinds after each forward, backward or step."""

    kinds: tuple[MemoryKind, ...]
    after: AfterPhase
    expected: Bound

    @property
    def name(self) -> str:
        """Name the law with its numbers."""
        return f"{self.expected} bytes {_spell(self.kinds)} after {self.after.value}"

    def judge(self, evidence: Evidence) -> Ruling:
        """Check the last event of each forward, backward or step on every rank."""
        broken: list[str] = []
        amounts: list[int] = []
        for rank, report in reports(evidence, broken):
            broken += _unseen(rank, report, self.kinds, evidence)
            for moment in self._ends(report, evidence, rank, broken):
                amounts.append(moment.num_bytes(self.kinds))
                broken += _breach(self.expected, "bytes left", moment, self.kinds, evidence, rank)
        return rule(self.name, broken, held=f"{_range(amounts)} at {len(amounts)} moments")

    def _ends(
        self, report: LifetimeReport, evidence: Evidence, rank: int, broken: list[str]
    ) -> Iterator[MemorySnapshot]:
        schedule = evidence.training.schedule
        phase = {
            AfterPhase.FORWARD: Phase.FORWARD,
            AfterPhase.BACKWARD: Phase.BACKWARD,
            AfterPhase.STEP: Phase.STEP,
        }[self.after]
        for step in range(schedule.steps):
            microbatches = (
                (-1,) if self.after is AfterPhase.STEP else tuple(range(schedule.microbatches_in(step)))
            )
            for microbatch in microbatches:
                found = last_of(report, step, microbatch, phase)
                if found is None:
                    broken.append(f"rank {rank}, step {step}: expected events in {phase}, got none")
                else:
                    yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """The peak of live bytes of these kinds in a phase of each step."""

    kinds: tuple[MemoryKind, ...]
    phase: Phase
    expected: Bound

    @property
    def name(self) -> str:
        return f"{self.expected} bytes {_spell(self.kinds)} at the peak of {self.phase}"

    def judge(self, evidence: Evidence) -> Ruling:
        broken: list[str] = []
        amounts: list[int] = []
        for rank, report in reports(evidence, broken):
            for step in range(evidence.training.schedule.steps):
                peak = self._peak(report, step)
                if peak is None:
                    broken.append(f"rank {rank}, step {step}: expected events in {self.phase}, got none")
                    continue
                amounts.append(peak.num_bytes(self.kinds))
                broken += _breach(self.expected, "bytes", peak, self.kinds, evidence, rank)
        return rule(self.name, broken, held=f"{_range(amounts)} in {len(amounts)} steps of ranks")

    def _peak(self, report: LifetimeReport, step: int) -> MemorySnapshot | None:
        def where(stretch: LoopSpan) -> bool:
            return stretch.step == step and stretch.phase is self.phase

        found = moments(report, where, self.kinds)
        return max(found, key=lambda moment: moment.num_bytes(self.kinds), default=None)


def _breach(
    expected: Bound,
    noun: str,
    moment: MemorySnapshot,
    kinds: tuple[MemoryKind, ...],
    evidence: Evidence,
    rank: int,
) -> Iterator[str]:
    """Yield a breach if the number of live bytes at this moment is not as expected."""
    if not _allows(expected, moment.num_bytes(kinds), kinds, evidence, rank):
        spelt = expected.spell(evidence.training, evidence.world_size)
        yield f"rank {rank}, {moment}: expected {spelt} {noun}, got {_count(moment, kinds)}"


def _allows(expected: Bound, got: int, kinds: tuple[MemoryKind, ...], evidence: Evidence, rank: int) -> bool:
    """Return whether a rank may hold so much, or what it may hold unseen besides; see [Note: what no rank owns]."""
    training, size = evidence.training, evidence.world_size
    if expected.allows(got, training, size):
        return True
    if MemoryKind.GATHERED not in kinds:
        return False
    (initial,) = (o.initial for o in evidence.ranks if o.rank == rank)
    owned = {name for name, shard in initial.items() if shard.tensor.numel()}
    unseen = sum(g.num_bytes for g in groups_of(training) if owned.isdisjoint(g.names))
    return expected.allows(got + unseen, training, size)


def _unseen(
    rank: int, report: LifetimeReport, kinds: tuple[MemoryKind, ...], evidence: Evidence
) -> Iterator[str]:
    """Yield that nothing of these kinds was ever alive, so that its end shows nothing."""
    if not any(life.kind in kinds for life in report.lives) and evidence.world_size > 1:
        yield f"rank {rank}: expected memory that is {_spell(kinds)} at some time, got none"


def _count(moment: MemorySnapshot, kinds: tuple[MemoryKind, ...]) -> str:
    """Format what is alive of some kinds, by kind and unit."""
    found: Counter[str] = Counter()
    for life in moment.alive:
        if life.kind in kinds:
            found[f"{life.kind} of {'?' if life.unit is None else repr(life.unit)}"] += life.num_bytes
    return f"{found.total()} ({spell_bytes(found)})"


def _range(amounts: list[int]) -> str:
    low, high = min(amounts, default=0), max(amounts, default=0)
    return f"{low} bytes" if low == high else f"{low} to {high} bytes"


def _spell(kinds: tuple[MemoryKind, ...]) -> str:
    return " and ".join(kinds)


_WHOLE = (MemoryKind.GATHERED, MemoryKind.STAGING)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardedOnlyInTurn:
    """While a unit computes it is gathered, and so are only the root and the ``ahead`` units whose turn is next.

    With ``keeps`` also those units whose backward is still to come: all before it in the order of the plan, which
    must be that of the forward. Buffers of gathers may besides be those of the unit whose turn it was before.
    The units' own hooks show where a unit's turn begins and ends, and an engine's hooks may run before them: once the
    unit is let go, the turn is taken for that of the next. `LiveBytes` and `PeakBytes` check what is gathered
    between turns.
    """

    phase: Phase
    ahead: int = 1
    keeps: bool = False

    @property
    def name(self) -> str:
        kept = ", those still to go backward" if self.keeps else ""
        return (
            f"in {self.phase} only the unit that computes, {self.ahead} ahead{kept} and the root are gathered"
        )

    def judge(self, evidence: Evidence) -> Ruling:
        broken: list[str] = []
        num_turns = 0
        for rank, report in reports(evidence, broken):
            units = tuple(u for u in evidence.training.plan.units if "," not in u)
            own = [t for t in self._turns(report) if t.place.unit in units]
            steps = {(t.place.step, t.place.unit) for t in own}
            expected = {(step, unit) for step in range(evidence.training.schedule.steps) for unit in units}
            num_turns += len(own)
            broken += [
                f"rank {rank}, step {step}: expected a turn of unit {unit!r} in {self.phase}, got none"
                for step, unit in sorted(expected - steps)
            ]
            broken += [f"rank {rank}, {text}" for turn in own for text in self._wrong(turn, units)]
        return rule(self.name, broken, held=f"in {num_turns} turns on {evidence.world_size} ranks")

    def _turns(self, report: LifetimeReport) -> Iterator[Turn]:
        return turns(report, lambda s: s.phase is self.phase and s.unit is not None, _WHOLE)

    def _wrong(self, turn: Turn, units: tuple[str, ...]) -> Iterator[str]:
        unit = turn.place.unit
        assert unit is not None
        if not any(unit in moment.units(MemoryKind.GATHERED) for moment in turn.moments):
            yield f"{turn.moments[0]}: expected it gathered while it computes, got it sharded"
        order = units if self.phase is Phase.FORWARD else tuple(reversed(units))
        was_gathered = False
        for moment in turn.moments:
            is_gathered = unit in moment.units(MemoryKind.GATHERED)
            is_over = was_gathered and not is_gathered
            was_gathered |= is_gathered
            for kind in _WHOLE:
                surplus = moment.units(kind) - self._allowed(order.index(unit) + is_over, order, kind)
                if surplus:
                    yield _describe_surplus(moment, kind, surplus)
                    return  # what is wrong at one event is so at the next

    def _allowed(self, index: int, order: tuple[str, ...], kind: MemoryKind) -> set[str]:
        """Return who may be gathered in the turn of ``order[index]``."""
        allowed = {"", *order[index : index + 1 + self.ahead]}
        if self.keeps:
            allowed |= set(order[index:] if self.phase is Phase.BACKWARD else order[:index])
        if kind is MemoryKind.STAGING:
            allowed |= set(order[max(0, index - 1) : index])
        return allowed


def _describe_surplus(moment: MemorySnapshot, kind: MemoryKind, surplus: frozenset[str]) -> str:
    lives = [life for life in moment.alive if life.kind is kind and life.unit in surplus]
    sites = "; ".join(made(life) for life in lives[:MOST_SITES])
    names = ", ".join(map(repr, sorted(surplus)))
    return f"{moment}: expected no {kind} memory of {names} at this time, got {sites}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTensorsLive:
    """No tensor of the user's has its memory resized or exchanged: inputs, outputs, buffers, ignored parameters.

    ``at_least`` names what must have been among them, by the beginning of the names that the watch gives.
    """

    at_least: tuple[str, ...] = ("an input", "an output")

    @property
    def name(self) -> str:
        known = f" ({', '.join(self.at_least)})" if self.at_least else ""
        return f"the user's tensors keep their memory{known}"

    def judge(self, evidence: Evidence) -> Ruling:
        broken: list[str] = []
        num_tensors = 0
        for rank, report in reports(evidence, broken):
            num_tensors += len(report.user_tensors)
            broken += [
                f"rank {rank}: expected {name} among the user's tensors, got none"
                for name in self.at_least
                if not any(tensor.name.startswith(name) for tensor in report.user_tensors)
            ]
            broken += [
                f"rank {rank}: expected {tensor.name} left alone, but {tensor.change}"
                for tensor in report.user_tensors
                if tensor.change
            ]
        return rule(self.name, broken, held=f"all {num_tensors} on {evidence.world_size} ranks")
