"""Laws that follow from plan, script and events of any training: how often, when and as what it communicates.

[Note: what calls need] A gather serves one call of a unit in forward, or one backward through it, unless the plan
lists the unit as gathered once; in backward it may serve a recomputation too, or a hint of the plan to prefetch a unit
whose own backward is over. A reduction serves one backward, also if the engine reduces in the step. There norms and
flags are exchanged too, a number for each parameter at once. In the optimizer step an engine that keeps parameters
whole exchanges each once. How often a unit was called, and how often backward reached it, is in the event log. Each
forward and backward of the loop may call every unit, whether or not its module shows it. Amounts are in bytes, so it
does not matter in how many collectives an engine sends them; parameters are padded as engines pad them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardproof.engine.contract import Accumulation, Capability, Cut, Layout
from shardproof.harness.cases.script import Probe
from shardproof.harness.cases.scripts.eventful import Eventful, goes_in_turn
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.units import UnitParameters, chunked_buffer_numel, groups_of
from shardproof.harness.cases.user_model import UserOptimizer, is_communicating
from shardproof.harness.laws.communication.bounds import ledgers, when
from shardproof.harness.laws.communication.order import spell_unit
from shardproof.harness.laws.law import Evidence, Law, Ruling, rule
from shardproof.harness.records.observation import Observation
from shardproof.harness.tracing.collectives.call import short_name
from shardproof.harness.tracing.events import EventKind
from shardproof.harness.tracing.ledger import Entry, Op, Phase
from shardproof.harness.training.layout_memory import share_numel

_Counts = Counter[tuple[int, int | None, EventKind, Phase | None, str | None]]
_REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
_SHARING = (Op.ALL_GATHER, Op.BROADCAST)
_IN_PASSES = (Phase.FORWARD, Phase.BACKWARD)
_IN_STEP = (Phase.STEP,)
_NUMBER_BYTES = 16  # at most, also of a complex one
# Engines communicate otherwise than by parameters' sizes where these are asked for.
_OF_OTHER_SIZES = {Capability.PACKED_GATHERS, Capability.SPARSE_GRADIENTS, Capability.UNIT_DTYPES}


def laws_of_needs(training: Training) -> tuple[Law, ...]:
    """Return the laws of this module that hold of a training."""
    laws: tuple[Law, ...] = ()
    if not training.plan.needs & _OF_OTHER_SIZES and training.plan.pipeline_stages == 1:
        laws = (CommunicatesAsNeeded(),)
    laws = (*laws, HeldBackIsSilent()) if _holds_back(training) else laws
    # A model of the user's may communicate in backward, and an optimizer that steps in it.
    is_alone = not is_communicating(training.problem) and not training.schedule.steps_in_backward
    return (*laws, ReducesAsAsked()) if training.plan.reduce_dtype is not None and is_alone else laws


def _holds_back(training: Training) -> bool:
    """Whether each microbatch but the last is held back, in a plain order and without another backward."""
    script = training.script
    # The backward of a probe is of no microbatch, and holds nothing back.
    has_another_backward = isinstance(script, Eventful) and script.has(Probe.OF_INPUTS)
    return (
        goes_in_turn(script)
        and not has_another_backward
        and training.plan.accumulation is Accumulation.LAST_MICROBATCH
        and training.schedule.microbatches > 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBackIsSilent:
    """No gradient is reduced before the last microbatch of a step, and buffers are sent in one microbatch alone."""

    name: str = "nothing is reduced before the last microbatch"

    def judge(self, evidence: Evidence) -> Ruling:
        schedule = evidence.training.schedule
        broken = []
        for rank, ledger in ledgers(evidence):
            sent = [e for e in ledger if _is_of_the_engine(e, evidence.training)]
            broken += [
                f"rank {rank} {when(e)}: expected no reduction before microbatch {last}, got {e.describe()}"
                for e in sent
                if e.op in _REDUCING
                and e.phase is Phase.BACKWARD
                and 0 <= e.microbatch < (last := schedule.microbatches_in(e.step) - 1)
            ]
            broken += [
                f"rank {rank} {when(e)}: expected no broadcast after that in microbatch {first}, got {e.describe()}"
                for e, first in _sent_again(sent, evidence.training)
            ]
        return rule(self.name, broken, held=f"in {schedule.steps} steps on {evidence.world_size} ranks")


def _sent_again(entries: Sequence[Entry], training: Training) -> Iterator[tuple[Entry, int]]:
    """Yield broadcasts of forwards after the microbatch of a step that has the first, with that microbatch.

    A rank may leave out microbatches. A forward that fails counts as the last microbatch's, whenever it is.
    """
    if isinstance(training.script, Eventful) and training.script.fails:
        return
    first: dict[int, int] = {}
    for e in entries:
        is_sent = e.op is Op.BROADCAST and e.phase is Phase.FORWARD and e.microbatch >= 0
        if is_sent and e.microbatch > first.setdefault(e.step, e.microbatch):
            yield e, first[e.step]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducesAsAsked:
    """Gradients of real numbers are reduced in the dtype that the plan asks for, in every backward.

    Numbers do not show it: what is reduced in fewer bits may be as near as they allow, and in more bits nearer.
    """

    name: str = "gradients are reduced in the dtype that the plan asks for"

    def judge(self, evidence: Evidence) -> Ruling:
        broken, num = [], 0
        for rank, ledger in ledgers(evidence):
            for entry in ledger:
                is_reduced = (
                    entry.op in _REDUCING and entry.phase is Phase.BACKWARD and "float" in entry.dtype
                )
                if entry.step < 0 or not is_reduced or not _is_of_the_engine(entry, evidence.training):
                    continue
                dtype = evidence.training.at(entry.step).plan.reduce_dtype
                num += 1
                if dtype is not None and entry.dtype != (wanted := short_name(dtype)):
                    broken.append(f"rank {rank} {when(entry)}: expected {wanted}, got {entry.describe()}")
        return rule(self.name, broken, held=f"{num} reductions on {evidence.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatesAsNeeded:
    """In each step at most what its calls and its update need is gathered and reduced; see the note above."""

    name: str = "gathers and reductions serve one call each"

    def judge(self, evidence: Evidence) -> Ruling:
        broken: list[str] = []
        worst = 0.0
        for observation in evidence.ranks:
            counts = _counts(observation)
            for step, entries in _by_step(observation, evidence.training):
                is_in_chunks = observation.cut is Cut.CHUNKS
                calls = _Calls(counts, evidence.training.at(step), evidence.world_size, is_in_chunks)
                for what, ops, phases, most in calls.limits(step):
                    sent = [e for e in entries if e.op in ops and e.phase in phases]
                    if phases != _IN_STEP:  # there each byte of an update counts
                        sent = [e for e in sent if not calls.is_number(e)]
                    got = sum(e.num_bytes for e in sent)
                    worst = max(worst, got / most) if most else worst
                    if got > most:
                        broken.append(
                            f"rank {observation.rank} step {step}: expected at most {most} bytes to be {what}, "
                            f"got {got}; {_most_often(sent)}"
                        )
        return rule(
            self.name, broken, held=f"at most {worst:.0%} of what calls may need, in any step on any rank"
        )


def _most_often(entries: Sequence[Entry]) -> str:
    counts = Counter((e.op, e.phase, e.unit, e.num_bytes, e.site) for e in entries)
    (op, phase, unit, num_bytes, site), times = counts.most_common(1)[0]
    return f"most often {times} x {op} of {num_bytes} bytes in {phase} of {spell_unit(unit or '')} at {site}"


def _by_step(observation: Observation, training: Training) -> Iterator[tuple[int, list[Entry]]]:
    """Yield the steps with what the engine sent in them."""
    found: dict[int, list[Entry]] = {}
    for entry in observation.ledger:
        if entry.step >= 0 and _is_of_the_engine(entry, training):
            found.setdefault(entry.step, []).append(entry)
    yield from found.items()


def _is_of_the_engine(entry: Entry, training: Training) -> bool:
    """Whether it carries numbers of a model, not an engine's own flags, and is not tensor parallelism's own."""
    is_of_numbers = "float" in entry.dtype or "complex" in entry.dtype or entry.dtype == "uint8"
    return is_of_numbers and (training.plan.cut_axis is None or entry.axis != training.plan.cut_axis)


def _counts(observation: Observation) -> _Counts:
    """Count the events of each microbatch and phase, and of all of a step, as None."""
    return Counter(
        (e.step, microbatch, e.what, phase, e.unit)
        for e in observation.events
        for microbatch in (None, e.microbatch)
        for phase in (None, e.phase)
    )


class _Calls:
    """How often each unit was called and reached by backward on one rank, step by step."""

    def __init__(
        self,
        counts: _Counts,
        training: Training,
        world_size: int,
        is_in_chunks: bool,
    ) -> None:
        self._counts, self._training, self._size = counts, training, world_size
        self._is_in_chunks = is_in_chunks
        self._groups = groups_of(training)
        self._is_held_back = _holds_back(training)
        self._number_bytes = _NUMBER_BYTES * sum(len(group.names) for group in self._groups)

    def is_number(self, entry: Entry) -> bool:
        """Return whether a step sends no more than a number for each parameter, such as its norm."""
        return entry.phase is Phase.STEP and entry.num_bytes <= self._number_bytes

    def limits(self, step: int) -> Iterator[tuple[str, tuple[Op, ...], tuple[Phase, ...], int]]:
        """Yield what may be sent, by which collectives in which phases, and the most bytes of it."""
        forwards, backwards = (
            self._counts[step, None, EventKind.BEGAN, phase, None]
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        backwards = backwards or forwards  # a user's own step runs backward by itself
        gathered = again = reduced = 0
        for group in self._groups:
            entered, reached = (
                self._times(step, None, what, group)
                for what in (EventKind.ENTERED, EventKind.BACKWARD_ENTERED)
            )
            num_bytes, through = self._padded_bytes(group), max(reached, backwards)
            recomputed = self._times(step, None, EventKind.ENTERED, group, Phase.BACKWARD)
            in_backward = 0 if group.unit in self._training.plan.gathered_once else through
            in_backward += through * self._num_late_hints(group)
            gathered += num_bytes * (max(entered, forwards) + in_backward)
            again += num_bytes * (recomputed + in_backward)
            reduced += num_bytes * (self._last_backwards(step, group) if self._is_held_back else through)
        through_step = (*_IN_PASSES, *_IN_STEP)
        # Optimizers may communicate too: Muon gathers what it orthogonalises, and those of users do what they like.
        is_of_user = isinstance(self._training.optimizer, UserOptimizer)
        is_of_pieces = Capability.PARAMETER_SHAPES not in self._training.needs and not is_of_user
        gathers_in = through_step if is_of_pieces else _IN_PASSES
        reduces_in = _IN_PASSES if is_of_user else through_step
        yield "gathered, once for each call of a unit", (Op.ALL_GATHER,), gathers_in, gathered
        what = "gathered in backward, once for each recomputation of a unit and each backward through it"
        yield what, (Op.ALL_GATHER,), (Phase.BACKWARD,), again
        for op in _REDUCING:
            yield "reduced, once for each backward through a unit", (op,), reduces_in, reduced
        if self._training.plan.layout in {Layout.ZERO1, Layout.ZERO2}:
            everything = sum(map(self._padded_bytes, self._groups)) * self._training.schedule.repeats
            yield "exchanged, once for each update", _SHARING, _IN_STEP, everything

    def _num_late_hints(self, group: UnitParameters) -> int:
        """Count the units whose backward is to gather a unit whose own backward was before: a hint that is followed."""
        plan = self._training.plan
        hints = () if plan.prefetch is None else plan.prefetch.backward
        later = plan.units[: plan.units.index(group.unit)] if group.unit in plan.units else ()
        return sum(unit in later and group.unit in hinted for unit, hinted in hints)

    def _last_backwards(self, step: int, group: UnitParameters) -> int:
        """Count the backwards of the last microbatch through a unit: it may be called twice, and a failed one again."""
        last = self._training.schedule.microbatches_in(step) - 1
        begun = self._counts[step, last, EventKind.BEGAN, Phase.BACKWARD, None]
        reached = self._times(step, last, EventKind.BACKWARD_ENTERED, group)
        return max(begun, reached, self._training.schedule.repeats)

    def _times(
        self,
        step: int,
        microbatch: int | None,
        what: EventKind,
        group: UnitParameters,
        phase: Phase | None = None,
    ) -> int:
        """Count an event over the modules of a unit, in one phase or in all."""
        return sum(self._counts[step, microbatch, what, phase, module] for module in group.unit.split(","))

    def _padded_bytes(self, group: UnitParameters) -> int:
        plan, convert = self._training.plan, self._training.convert
        # Engines may reduce in float32 unasked: how often is judged here, and in which dtype where a plan asks for one.
        dtypes = [d or torch.float32 for d in (convert, plan.compute_dtype, plan.reduction_dtype)]
        width = max([group.bytes_per_element, *(d.itemsize for d in dtypes)])
        if self._is_in_chunks:
            return chunked_buffer_numel(group, self._size) * self._size * width
        numel = sum(share_numel(shape, plan, self._size, group.bytes_per_element) for shape in group.shapes)
        return (numel + self._size) * self._size * width
