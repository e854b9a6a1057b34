"""Laws over a training's execution: notes of its script, states of units, equal repetitions, and no races."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardproof.harness.cases.training import (
    AFTER_LOADING,
    AS_SHOWN,
    BEFORE_LOADING,
    COMPUTED_IN,
    HELD,
    INFINITE_NORM,
    LOSS_SCALE,
    OF_ALL_RANKS,
    RANDOM,
    LossScaling,
)
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.absolute_error import deviation
from shardproof.harness.oracle.oracle_observation import INITIAL_STEP, Quantity, TensorKey
from shardproof.harness.records.observation import StepObservation
from shardproof.harness.tracing.collectives.call import short_name

_NOTHING = "nothing"  # stands for a note that was never made


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedUnitState:
    """At a moment a unit is gathered (``unsharded``), or each rank has only its share (``sharded``)."""

    moment: str
    unit: str
    is_unsharded: bool

    @property
    def value(self) -> str:
        """Format the state as it is observed."""
        return "unsharded" if self.is_unsharded else "sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsAre:
    """At each moment of every step each unit is in the given state, on every rank."""

    states: tuple[ExpectedUnitState, ...]

    @property
    def name(self) -> str:
        moments = dict.fromkeys(s.moment for s in self.states)
        return f"units are gathered and freed as planned ({', '.join(moments)})"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = [
            f"step {step}, rank {rank}, {wanted.moment}: expected unit {wanted.unit!r} {wanted.value}, got {got}"
            for rank, step, seen in _steps(evidence)
            for wanted in self.states
            if (got := _value(seen, wanted.moment, f"unit {wanted.unit!r}")) != wanted.value
        ]
        return rule(
            self.name, broken, held=f"{len(self.states)} states in every step on {evidence.world_size} ranks"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """The script made this note about a subject, in every step on every rank.

    ``is_explained``: a note with another value is itself an explanation of the fault. ``step``: only this step.
    """

    subject: str
    value: str
    is_explained: bool = False
    step: int | None = None

    @property
    def name(self) -> str:
        return f"{self.subject} is {self.value}"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = []
        for rank, step, seen in _steps(evidence):
            if self.step not in {None, step}:
                continue
            values = [fact.value for fact in seen.facts if fact.subject == self.subject] or [_NOTHING]
            broken += [
                f"step {step}, rank {rank}: {self._described(value)}"
                for value in values
                if value != self.value
            ]
        return rule(self.name, broken, held=f"in every step on {evidence.world_size} ranks")

    def _described(self, value: str) -> str:
        if self.is_explained and value != _NOTHING:
            return f"{self.subject}: {value}"
        item = _first_unlike(self.value, value)
        return f"expected {self.subject} to be {self.value}, got {value}{f': {item}' if item else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandsOutOneState:
    """Each rank hands out the same parameters and optimizer state, also what other ranks hold: any rank may save it."""

    name: str = "ranks hand out the same whole state"

    def judge(self, evidence: Evidence) -> Ruling:
        handed: dict[int, list[list[str]]] = {}
        num_states = 0
        broken = []
        for rank, step, seen in _steps(evidence):
            states = [fact.value.split() for fact in seen.facts if fact.subject == OF_ALL_RANKS]
            num_states += len(states)
            if states != (first := handed.setdefault(step, states)):
                one = {word for state in first for word in state} ^ {
                    word for state in states for word in state
                }
                place = min(one, default="another number of states").partition("=")[0]
                broken.append(
                    f"step {step}, rank {rank}: expected what another rank hands out, got other: {place}"
                )
        return rule(self.name, broken, held=f"{num_states} states on {evidence.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsWhatItShows:
    """Whenever parameters are read, the caller's own module holds them too, as far as it holds whole ones or DTensors.

    What is shown may come from copies that are right, while the module that a user saves and evaluates is not.
    """

    name: str = "the module holds the parameters shown"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at what the loop noted of every read."""
        notes = [
            (f"step {step}, rank {rank}: {fact.value}", fact.value.startswith(AS_SHOWN))
            for rank, step, seen in _steps(evidence)
            for fact in seen.facts
            if fact.subject == HELD
        ]
        broken = [text for text, is_held in notes if not is_held]
        return rule(
            self.name,
            broken,
            held=f"{notes[-1][0]}, and in {len(notes) - 1} more reads" if notes else "never read",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputesAsAsked:
    """Units compute in the dtypes that the plan asks for, in every forward.

    Numbers do not show it: a unit that is to compute in float32 among others in bfloat16 may compute in bfloat16 too,
    and one in bfloat16 may be more exact than it needs to be.
    """

    name: str = "units compute in the dtypes that the plan asks for"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at what the hooks of units noted in each step."""
        broken, units = [], set[str]()
        for rank, step, seen in _steps(evidence):
            plan = evidence.training.at(step).plan
            asked = {own.unit: own.compute_dtype for own in plan.unit_dtypes}
            for fact in (fact for fact in seen.facts if fact.subject == COMPUTED_IN):
                dtype = asked.get(fact.moment, plan.compute_dtype)
                units.add(fact.moment)
                if dtype is not None and fact.value != (wanted := short_name(dtype)):
                    unit = f"unit {fact.moment!r}" if fact.moment else "the root"
                    broken.append(
                        f"step {step}, rank {rank}: expected {unit} to compute in {wanted}, got {fact.value}"
                    )
        broken += [] if units else ["expected units that compute, none was seen to"]
        return rule(self.name, broken, held=f"{len(units)} units on {evidence.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawsApart:
    """A load leaves apart the random number generators of ranks that had different states.

    Else dropout is the same on all ranks, and every loss looks right (Megatron-LM#6858). What preparing does is not
    judged: some engines seed all ranks alike on purpose.
    """

    name: str = "loading leaves each rank random numbers of its own"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare the states of the ranks' generators before and after each load, unless some are alike before it."""
        broken, num_loads = [], 0
        for step in range(min(len(observation.steps) for observation in evidence.ranks)):
            before, after = (
                {o.rank: _value(o.steps[step], moment, RANDOM) for o in evidence.ranks}
                for moment in (BEFORE_LOADING, AFTER_LOADING)
            )
            if _NOTHING in before.values() or len(set(before.values())) < len(before):
                continue
            num_loads += 1
            ranks: dict[str, list[int]] = {}
            for rank, state in after.items():
                ranks.setdefault(state, []).append(rank)
            broken += [
                f"step {step}: ranks {alike} have one state of their random number generators, which differed before"
                for alike in ranks.values()
                if len(alike) > 1
            ]
        return rule(self.name, broken, held=f"in {num_loads} loads on {evidence.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalesLosses:
    """A step that overflows on any rank halves the factor of the losses on all ranks; no other step does.

    The norm of gradients of which one element is infinite is infinite: NaN would spread to all that is clipped by it.
    """

    scaling: LossScaling
    name: str = "ranks skip steps and change the loss scale together"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare the factor after each step."""
        skipped = self.scaling.overflows_at
        overflow = "" if skipped is None else f" (the last rank overflows in step {skipped})"
        broken = [
            f"step {step}, rank {rank}: expected {LOSS_SCALE} {expected}, got {got}{overflow}"
            for rank, step, seen in _steps(evidence)
            if (got := _value(seen, "", LOSS_SCALE)) != (expected := str(self.scaling.after(step)))
        ]
        broken += [
            f"step {step}, rank {rank}: expected {INFINITE_NORM} to be infinite, got {norm}"
            for rank, step, seen in _steps(evidence)
            if (norm := _value(seen, "", INFINITE_NORM)) not in {_NOTHING, "inf"}
        ]
        return rule(self.name, broken, held=f"in every step on {evidence.world_size} ranks")


def _first_unlike(expected: str, got: str) -> str | None:
    """Name the first item that differs in two lists noted as texts; None if they are no lists."""
    try:
        wanted, found = ast.literal_eval(expected), ast.literal_eval(got)
    except (ValueError, SyntaxError):
        return None
    if not (isinstance(wanted, list) and isinstance(found, list)):
        return None
    if len(wanted) != len(found):
        return f"{len(found)} items instead of {len(wanted)}"
    unlike = (i for i, (one, other) in enumerate(zip(wanted, found, strict=True)) if one != other)
    return next((f"item {i} is {found[i]!r} instead of {wanted[i]!r}" for i in unlike), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowsTheModel:
    """At these moments the parameters that modules expose equal the oracle's, from before the step's update."""

    moments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"modules show the oracle's parameters ({', '.join(self.moments)})"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = [
            text
            for rank, step, seen in _steps(evidence)
            for moment in self.moments
            for text in self._wrong(evidence, step, seen, moment, f"step {step}, rank {rank}, {moment}")
        ]
        return rule(self.name, broken, held=f"in every step on {evidence.world_size} ranks")

    def _wrong(
        self, evidence: Evidence, step: int, seen: StepObservation, moment: str, where: str
    ) -> Iterator[str]:
        shown = seen.snapshots.get(moment, {})
        quantity = Quantity.INITIAL if step == 0 else Quantity.PARAMETER
        before = INITIAL_STEP if step == 0 else step - 1
        for name, whole in evidence.oracle.reference(quantity, before, rank=0).items():
            if name not in shown:
                yield f"{where}: expected parameter {name!r}, got nothing"
                continue
            place = TensorKey(quantity=quantity, step=before, name=name)
            assert whole is not None
            error = _error(shown[name].tensor, shown[name].of(whole))
            allowed = allowed_error(evidence.oracle, place)
            if not error <= allowed:  # NaN is wrong too
                yield f"{where}: parameter {name!r} is off by {error:.3g}, allowed {allowed:.3g}"


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    return deviation(got, expected).max().item() if got.numel() else 0.0


def _steps(evidence: Evidence) -> Iterator[tuple[int, int, StepObservation]]:
    for observation in evidence.ranks:
        for step, seen in enumerate(observation.steps):
            yield observation.rank, step, seen


def _value(seen: StepObservation, moment: str, subject: str) -> str:
    found = (f.value for f in seen.facts if (f.moment, f.subject) == (moment, subject))
    return next(found, _NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterministic:
    """All repetitions in the schedule agree in every bit of every tensor, loss and norm."""

    name: str = "repeats itself bitwise"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare the hashes of all repetitions, on every rank."""
        broken = []
        for observation in evidence.ranks:
            digests = observation.repeat_digests
            if len(digests) < 2:
                broken.append(f"rank {observation.rank}: expected several repetitions, got {len(digests)}")
            elif len(set(digests)) > 1:
                first = next(i for i, d in enumerate(digests) if d != digests[0])
                how = "" if evidence.training.schedule.are_repeats_read else ", read at its end alone,"
                broken.append(
                    f"rank {observation.rank}: repetition {first} of {len(digests)}{how} differs from the first"
                )
        held = f"{evidence.training.schedule.repeats} repetitions on {evidence.world_size} ranks"
        return rule(self.name, broken, held=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRaces:
    """Two operators touch the same memory, one of them writing, only if happens-before orders them."""

    @property
    def name(self) -> str:
        return "streams wait for each other"

    def judge(self, evidence: Evidence) -> Ruling:
        broken: list[str] = []
        num_touches, num_streams, num_collectives = 0, 0, 0
        for observation in evidence.ranks:
            report = observation.race_report
            if report is None or not report.num_touches:
                broken.append(
                    f"rank {observation.rank}: expected a watch over its streams, got none that saw any"
                )
                continue
            num_touches += report.num_touches
            num_collectives += report.num_collectives
            num_streams = max(num_streams, report.num_streams)
            broken += [f"rank {observation.rank}: {race}" for race in report.races]
        held = (
            f"{num_touches} touches of memory and {num_collectives} collectives on {evidence.world_size} ranks, "
            f"up to {num_streams} streams each"
        )
        return rule(self.name, broken, held=held)
