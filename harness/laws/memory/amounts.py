"""Laws over how much memory is alive: after a phase, at its peak, and from step to step.

[Note: what nobody owns] A gather is known by the shares that it is given. Of a unit of which a rank owns nothing, as
where one element is left for seven ranks, it is given padding alone, which an engine may keep in memory that no
parameter lies in: what is gathered then may or may not be seen, and as many bytes may be missing on that rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from harness.cases.units import groups_of
from harness.laws.communication.bounds import Expectation
from harness.laws.law import Evidence, Ruling, rule
from harness.laws.memory.sight import MOST_SITES, made, reports
from harness.tracing.ledger import Phase
from harness.tracing.memory.report import Kind, LifetimeReport, Stretch
from harness.tracing.memory.timeline import Moment, last_of, moments, spell_bytes

__all__ = ["Left", "NoLeaks", "Peak", "When"]


class When(Enum):
    """After what."""

    FORWARD = "each forward"
    BACKWARD = "each backward"
    STEP = "each step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """So many bytes of these kinds are alive after each forward, backward or step."""

    kinds: tuple[Kind, ...]
    after: When
    expected: Expectation

    @property
    def name(self) -> str:
        """Say the law with its numbers."""
        return f"{self.expected} bytes {_spell(self.kinds)} after {self.after.value}"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at the last event of each forward, backward or step on every rank."""
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
    ) -> Iterator[Moment]:
        schedule = evidence.training.schedule
        phase = {When.FORWARD: Phase.FORWARD, When.BACKWARD: Phase.BACKWARD, When.STEP: Phase.STEP}[
            self.after
        ]
        microbatches = (-1,) if self.after is When.STEP else tuple(range(schedule.microbatches))
        for step in range(schedule.steps):
            for microbatch in microbatches:
                found = last_of(report, step, microbatch, phase)
                if found is None:
                    broken.append(f"rank {rank}, step {step}: expected events in {phase}, got none")
                else:
                    yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """At most so many bytes of these kinds are alive at once in a phase of each step."""

    kinds: tuple[Kind, ...]
    phase: Phase
    expected: Expectation

    @property
    def name(self) -> str:
        """Say the law with its numbers."""
        return f"{self.expected} bytes {_spell(self.kinds)} at the peak of {self.phase}"

    def judge(self, evidence: Evidence) -> Ruling:
        """Find the peak of each step on every rank."""
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

    def _peak(self, report: LifetimeReport, step: int) -> Moment | None:
        def where(stretch: Stretch) -> bool:
            return stretch.step == step and stretch.phase is self.phase

        found = moments(report, where, self.kinds)
        return max(found, key=lambda moment: moment.num_bytes(self.kinds), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLeaks:
    """At the end of each step as many bytes of each kind are alive as at the end of the one before.

    The first step is left out: optimizers make their state in it. So is the user's memory: the loop's own data
    differ from step to step.
    """

    name: str = "each step leaves as much memory as the one before"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare every step after the second with the second, kind by kind, on every rank."""
        broken: list[str] = []
        steps = evidence.training.schedule.steps
        if steps < 3:
            broken.append(f"expected three steps or more to compare, got {steps}; try Schedule(steps=5)")
        held: Counter[str] = Counter()
        for rank, report in reports(evidence, broken):
            ends = [last_of(report, step, -1, Phase.STEP) for step in range(steps)]
            told = [_by_kind(end) for end in ends if end is not None]
            if len(told) < steps or not any(told):
                broken.append(f"rank {rank}: expected the end of {steps} steps, got {len(told)}")
                continue
            held = max(held, told[-1], key=Counter.total)
            for step, (before, now) in enumerate(pairwise(told[1:]), start=2):
                changed = {kind: now[kind] - before[kind] for kind in {*now, *before}}
                changed = {kind: num_bytes for kind, num_bytes in changed.items() if num_bytes}
                if changed:
                    broken.append(
                        f"rank {rank}, step {step}: expected as many bytes as a step before, got a change of "
                        f"{spell_bytes(changed)}{_survivors(report, step, set(changed))}"
                    )
        return rule(self.name, broken, held=f"{spell_bytes(held)} bytes after {steps} steps at the most")


def _breach(
    expected: Expectation, noun: str, moment: Moment, kinds: tuple[Kind, ...], evidence: Evidence, rank: int
) -> Iterator[str]:
    """Tell that at this moment another number of bytes is alive than expected, if so."""
    if not _allows(expected, moment.num_bytes(kinds), kinds, evidence, rank):
        spelt = expected.spell(evidence.training, evidence.world_size)
        yield f"rank {rank}, {moment}: expected {spelt} {noun}, got {_count(moment, kinds)}"


def _allows(expected: Expectation, got: int, kinds: tuple[Kind, ...], evidence: Evidence, rank: int) -> bool:
    """Say whether a rank may hold so much, or what it may hold unseen besides; see [Note: what nobody owns]."""
    training, size = evidence.training, evidence.world_size
    if expected.allows(got, training, size):
        return True
    if Kind.GATHERED not in kinds:
        return False
    (initial,) = (o.initial for o in evidence.ranks if o.rank == rank)
    owned = {name for name, shard in initial.items() if shard.tensor.numel()}
    unseen = sum(g.num_bytes for g in groups_of(training) if owned.isdisjoint(g.names))
    return expected.allows(got + unseen, training, size)


def _unseen(rank: int, report: LifetimeReport, kinds: tuple[Kind, ...], evidence: Evidence) -> Iterator[str]:
    """Tell that nothing of these kinds was ever alive, so that its end shows nothing."""
    if not any(life.kind in kinds for life in report.lives) and evidence.world_size > 1:
        yield f"rank {rank}: expected memory that is {_spell(kinds)} at some time, got none"


def _survivors(report: LifetimeReport, step: int, kinds: set[str]) -> str:
    """Name what was made in a step and outlived the whole training."""
    starts = [s.start for s in report.stretches if s.step == step]
    end = next((s.start for s in report.stretches if s.step > step and s.start > max(starts)), None)
    kept = [
        life
        for life in report.lives
        if life.kind in kinds
        and life.died is None
        and starts[0] <= life.born
        and (end is None or life.born < end)
    ]
    return f"; never let go: {'; '.join(map(made, kept[:MOST_SITES]))}" if kept else ""


def _by_kind(moment: Moment) -> Counter[str]:
    found: Counter[str] = Counter()
    for life in moment.alive:
        if life.kind is not Kind.USER:
            found[life.kind] += life.num_bytes
    return found


def _count(moment: Moment, kinds: tuple[Kind, ...]) -> str:
    """Spell what is alive of some kinds, by kind and unit."""
    found: Counter[str] = Counter()
    for life in moment.alive:
        if life.kind in kinds:
            found[f"{life.kind} of {'?' if life.unit is None else repr(life.unit)}"] += life.num_bytes
    return f"{found.total()} ({spell_bytes(found)})"


def _range(amounts: list[int]) -> str:
    low, high = min(amounts, default=0), max(amounts, default=0)
    return f"{low} bytes" if low == high else f"{low} to {high} bytes"


def _spell(kinds: tuple[Kind, ...]) -> str:
    return " and ".join(kinds)
