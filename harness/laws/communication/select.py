"""Selections of the ledger entries that a law is about, and the microbatches or steps in which it counts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from shardproof.harness.cases.training import Schedule
from shardproof.harness.tracing.events import TraceEvent
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase

NOT_THE_ENGINES = frozenset({Phase.OBSERVE, Phase.MODEL})
BEFORE_STEPS = -1  # the step of communication in prepare
NOTHING_OBSERVED = "expected some collective in training, got none: nothing was observed"


class Window(Enum):
    """The part of a training that a selection covers; the harness's own reads are in none of them."""

    STEADY = "every step after the first"  # step 0 warms up: lazy groups, rebuilt buckets
    TRAINING = "every step"
    EVERYTHING = "every step, and before the first"  # adds the communication in prepare


class Microbatches(Enum):
    """The microbatches of a step, however many it has."""

    ALL = "all"
    LAST = "last"  # where an accumulating engine communicates
    ALL_BUT_LAST = "all but last"  # where it must not


class Per(Enum):
    """The unit of time in which a number is counted."""

    MICROBATCH = "microbatch"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LoopStep:
    """One step of a training, or one microbatch of it; microbatch is None for the whole step."""

    step: int
    microbatch: int | None = None

    def holds(self, happened: Entry | TraceEvent) -> bool:
        """Return whether an entry was issued, or an event happened, at this moment."""
        return happened.step == self.step and self.microbatch in {None, happened.microbatch}

    def __str__(self) -> str:
        if self.step == BEFORE_STEPS:
            return "before step 0"
        return f"step {self.step}" + ("" if self.microbatch is None else f" microbatch {self.microbatch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """Picks entries: each field narrows, an empty field does not.

    ``steps`` takes precedence over ``window``. ``microbatches`` are ``Microbatches`` or indices. Entries of
    phase OBSERVE belong to the harness, those of MODEL to the model; they are picked only when ``phases`` names them.
    """

    ops: tuple[Op, ...] = ()
    phases: tuple[Phase, ...] = ()
    dtypes: tuple[str, ...] = ()  # such as "float32"; integers are an engine's own bookkeeping
    axis: str | None = None
    group_size: int | None = None
    units: tuple[str | None, ...] = ()  # None is the unit of calls outside every unit
    window: Window = Window.STEADY
    steps: tuple[int, ...] = ()
    microbatches: Microbatches | tuple[int, ...] = Microbatches.ALL

    def __post_init__(self) -> None:
        for name in ("ops", "phases", "dtypes", "units", "steps"):
            # A string is a sequence too: `ops=Op.ALL_REDUCE` would match letters, and so no entry.
            if not isinstance(getattr(self, name), tuple):
                raise TypeError(f"Select.{name}: expected a tuple, got {getattr(self, name)!r}; try a comma")
        if Phase.PREPARE in self.phases and not self._covers_step(BEFORE_STEPS):
            raise ValueError(
                f"Select.phases: expected a window that holds PREPARE, got {self.window.name} {self.steps}; "
                "try window=Window.EVERYTHING"
            )

    def __str__(self) -> str:
        """Format the fields that narrow, for the names of laws."""
        spelt = (
            "/".join(self.ops) or "any collective",
            f"in {'/'.join(self.phases)}" if self.phases else "",
            f"of {'/'.join(self.dtypes)}" if self.dtypes else "",
            f"on axis {self.axis}" if self.axis else "",
            f"in groups of {self.group_size}" if self.group_size else "",
            f"of unit {'/'.join(map(str, self.units))}" if self.units else "",
            f"at steps {list(self.steps)}" if self.steps else "",
            f"over {self.window.value}" if self.window is not Window.STEADY else "",
            self._spell_microbatches(),
        )
        return " ".join(filter(None, spelt))

    def pick(self, ledger: Ledger, schedule: Schedule) -> Ledger:
        """Return the selected entries, in order of issue."""
        return tuple(entry for entry in ledger if self._matches(entry, schedule))

    def moments(self, schedule: Schedule, per: Per) -> tuple[LoopStep, ...]:
        """Return the steps or microbatches that this selection covers; empty where the schedule has none of them."""
        return tuple(self._moments(schedule, per))

    def _moments(self, schedule: Schedule, per: Per) -> Iterator[LoopStep]:
        if per is Per.STEP and self._covers_step(BEFORE_STEPS):
            yield LoopStep(step=BEFORE_STEPS)
        for step in filter(self._covers_step, range(schedule.steps)):
            indices = self._indices(schedule, step)
            if per is Per.MICROBATCH:
                yield from (LoopStep(step=step, microbatch=m) for m in indices)
            elif indices:
                yield LoopStep(step=step)

    def _indices(self, schedule: Schedule, step: int) -> range | tuple[int, ...]:
        last = schedule.microbatches_in(step) - 1
        match self.microbatches:
            case Microbatches.ALL:
                return range(last + 1)
            case Microbatches.LAST:
                return (last,)
            case Microbatches.ALL_BUT_LAST:
                return range(last)
            case indices:
                return tuple(m for m in indices if m <= last)

    def _covers_step(self, step: int) -> bool:
        if self.steps:
            return step in self.steps
        first = {Window.STEADY: 1, Window.TRAINING: 0, Window.EVERYTHING: BEFORE_STEPS}
        return step >= first[self.window]

    def _spell_microbatches(self) -> str:
        match self.microbatches:
            case Microbatches.ALL:
                return ""
            case Microbatches():
                return f"on {self.microbatches.value} microbatches"
            case indices:
                return f"on microbatches {list(indices)}"

    def _matches(self, entry: Entry, schedule: Schedule) -> bool:
        return (
            self._covers_step(entry.step)
            and (not self.ops or entry.op in self.ops)
            and (entry.phase in self.phases if self.phases else entry.phase not in NOT_THE_ENGINES)
            and (not self.dtypes or entry.dtype in self.dtypes)
            and self.axis in {None, entry.axis}
            and self.group_size in {None, len(entry.group)}
            and (not self.units or entry.unit in self.units)
            and (
                self.microbatches is Microbatches.ALL
                or entry.microbatch in self._indices(schedule, entry.step)
            )
        )


def shows_nothing(ledger: Ledger) -> bool:
    """Return whether a ledger has no entry of a training, so that it proves nothing."""
    return all(entry.phase in NOT_THE_ENGINES for entry in ledger)
