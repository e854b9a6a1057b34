"""The training loop around an engine: labels phases, transfers state between models, and observes the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from shardproof.engine.contract import (
    Copies,
    Cut,
    NoGradient,
    Plan,
    PreparedModel,
    Shard,
    UnsupportedError,
)
from shardproof.harness.cases.scripts.eventful import Eventful, goes_in_turn
from shardproof.harness.cases.state_form import StateForm
from shardproof.harness.cases.training import (
    AS_HELD,
    COMPUTED_IN,
    HANDED_OUT,
    HELD,
    INFINITE_NORM,
    LOSS_SCALE,
    LoopOrder,
    Training,
)
from shardproof.harness.cases.units import ignored_that_train
from shardproof.harness.cases.user_model import (
    StepSchedules,
    UserModel,
    is_stepping,
    written_by_forward,
)
from shardproof.harness.records.observation import (
    Fact,
    Observation,
    StepObservation,
)
from shardproof.harness.torch_compat.dtypes import num_bytes_of
from shardproof.harness.tracing.collectives.call import short_name
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.memory.memory_report import CensusTime
from shardproof.harness.tracing.probe_point import ValueKind
from shardproof.harness.training.callers_module import Preparation
from shardproof.harness.training.engine_actor import EngineActor
from shardproof.harness.training.handover import (
    load_files,
    load_shares,
    read_note,
    read_whole,
    state_of,
    write_files,
    write_whole,
)
from shardproof.harness.training.ignored_gradients import average_ignored
from shardproof.harness.training.loss_scale import ScaledSteps
from shardproof.harness.training.model_census import ModelCensus
from shardproof.harness.training.noted_loads import NotedLoads, to_be_loaded
from shardproof.harness.training.rank_step import OwnStep
from shardproof.harness.training.reads import (
    calling,
    read_declared,
    read_gradients,
    read_norm,
    read_shards,
)
from shardproof.harness.training.watches import Watches, observing
from shardproof.harness.training.whole_state import copied, wipe
from shardproof.harness.worlds.exception_outcome import kind_of, text_of
from shardproof.harness.worlds.rank import RankContext

_S = TypeVar("_S", Shard, Shard | None)

# The errors by which an engine refuses. Other errors are defects, even if the plan exceeds its capabilities.
_REFUSALS = (UnsupportedError, NotImplementedError, ValueError)


@runtime_checkable
class _TakesSteps(Protocol):
    """A prepared model that schedules the microbatches of a step itself, as a pipeline does."""

    def play(self, actor: EngineActor) -> None:
        """Run all microbatches of a step."""


class RefusedError(Exception):
    """The engine refused the plan before training."""


@contextmanager
def refusing() -> Iterator[None]:
    """Convert the errors by which an engine refuses into RefusedError."""
    try:
        yield
    except _REFUSALS as refusal:
        raise RefusedError(f"{kind_of(refusal)}: {text_of(refusal)}") from refusal


def train(
    prepare: Callable[[Plan], Preparation],
    training: Training,
    context: RankContext,
    watches: Watches,
    *,
    before: Path | None = None,
    is_read: bool = True,
) -> Observation:
    """Run the whole schedule; ``prepare`` makes the model, and the fresh one in which the training resumes.

    ``before`` is the folder with the saved state of the previous world. Unless ``is_read``, the engine is not read
    before the last step is done. The loop passes to ``watches`` what they cannot see: the owner of a tensor, and the
    end of a step.
    """
    loop = _started(prepare(training.plan), training, context, watches)
    if training.origin is not None:
        assert before is not None
        with loop.loads.noting_generator():
            loop.start_from(before, training.origin.form)
    with loop.reading():
        initial = loop.keep(loop.read_parameters()) if is_read else {}
        loop.probe_start(initial)
    steps = []
    for step in range(training.schedule.steps):
        if training.resume is not None and step == training.resume.after_steps:
            plan = training.resume.plan
            fresh = None if plan is None else prepare(plan)
            with loop.loads.noting_generator():
                loop.resume_in(fresh, step, training.resume.form)
        steps.append(loop.step(step, is_read=is_read))
    with loop.reading():
        return Observation(
            rank=context.rank,
            input_digest=loop.input_digest,
            initial=initial,
            steps=tuple(steps),
            optimizer_state=read_shards(loop.prepared, "local_optimizer_state"),
            buffers=loop.buffers(),
            ledger=(),  # in the journal
            cut=read_declared(loop.prepared, "cut", Cut),
            no_gradient=read_declared(loop.prepared, "no_gradient", NoGradient),
            copies=read_declared(loop.prepared, "copies", Copies),
            counts=() if watches.census is None else watches.census.counts,
            filled=None if watches.census is None else watches.census.peak,
        )


def train_and_save(
    preparation: Preparation, training: Training, context: RankContext, form: StateForm
) -> None:
    """Run the whole schedule and save the state in files; observes nothing."""
    loop = _started(preparation, training, context, None)
    for step in range(training.schedule.steps):
        loop.step(step, is_read=False)
    loop.save(form)


def _started(
    preparation: Preparation, training: Training, context: RankContext, watches: Watches | None
) -> _Loop:
    """Convert the model, build its optimizer, and create its loop."""
    prepared = preparation.prepared
    if training.convert is not None:
        prepared.convert(training.convert)
    loop = _Loop(preparation, training, context, watches)
    with refusing():
        if training.schedule.steps_in_backward:
            prepared.optimizer_in_backward(loop.schedules.factory)
        elif training.origin is not None:
            prepared.optimizer(to_be_loaded(loop.schedules.factory))
        else:
            prepared.optimizer(loop.schedules.factory)
        if not training.schedule.steps_in_backward:
            loop.schedules.follow(prepared)
    preparation.settle()
    loop.scale_losses()
    return loop


class _Loop:
    """One rank's training loop."""

    def __init__(
        self,
        preparation: Preparation,
        training: Training,
        context: RankContext,
        watches: Watches | None,
    ) -> None:
        self._preparation = preparation
        steps_before = 0 if training.origin is None else training.origin.steps
        self.schedules = StepSchedules(training.optimizer, steps_done=steps_before)
        self._training = training
        self._written = written_by_forward(training.problem)
        self._ignored = ignored_that_train(training)
        self._context = context
        self._watches = watches
        self._lifetimes = None if watches is None else watches.lifetimes
        self._census = None if watches is None else watches.census
        self._probes = None if watches is None else watches.probes
        self._inputs = hashlib.sha256()
        self.loads = NotedLoads(training, context, watches)
        self._memory = ModelCensus(training, context, watches)
        self._scaled: ScaledSteps | None = None

    @property
    def prepared(self) -> PreparedModel:
        """The model that trains now."""
        return self._preparation.prepared

    @property
    def input_digest(self) -> str:
        """Hash of all data so far."""
        return self._inputs.hexdigest()

    def keep(self, shards: dict[str, _S]) -> dict[str, _S]:
        """Report the memory that the harness itself holds from now on to the census, if there is one."""
        if self._census is not None:
            self._census.observed_bytes += sum(
                num_bytes_of(shard.tensor) for shard in shards.values() if shard is not None
            )
        return shards

    def buffers(self) -> dict[str, Shard]:
        """Read the buffers, and the parameters that forward writes."""
        shards = read_shards(self.prepared, "local_parameters") if self._written else {}
        written = {name: shard for name, shard in shards.items() if name in self._written}
        return read_shards(self.prepared, "local_buffers") | written

    def reading(self, step: int = -1) -> AbstractContextManager[None]:
        """Return a context in which the engine is observed."""
        return observing(self._context, self._watches, step)

    def scale_losses(self) -> None:
        """Create a gradient scaler for the current model, with the previous scaler's state, if the schedule has one."""
        scaling = self._training.schedule.scaling
        if scaling is not None:
            self._scaled = ScaledSteps(self.prepared, scaling, self._scaled)

    def save(self, form: StateForm) -> None:
        """Save the state in files for another world; a whole one with a note of how the ranks' shards differ."""
        if form is StateForm.WHOLE:
            state = state_of(self.prepared, form)
            write_whole(state, self.loads.difference_from(self.prepared, state, step=-1), self._context)
        else:
            write_files(self.prepared, form, self._context)

    def start_from(self, before: Path, form: StateForm) -> None:
        """Load the state that a world of another size saved in a folder."""
        if form is StateForm.WHOLE:
            noted = {HANDED_OUT: read_note(before) or AS_HELD}
            self.loads.load_whole(self.prepared, read_whole(before, self._context.device), 0, noted)
        else:
            load_files(self.prepared, form, before)

    def probe_start(self, initial: dict[str, Shard]) -> None:
        """Show the probes the model as it begins."""
        if self._probes is not None:
            self._probes.follow(self.prepared)
            is_loaded = self._training.origin is not None
            self._probes.shards(
                ValueKind.LOADED if is_loaded else ValueKind.INITIAL, 0 if is_loaded else -1, initial
            )
            if is_loaded:
                self._probes.state(ValueKind.LOADED_STATE, 0, self.prepared)

    def read_parameters(self) -> dict[str, Shard]:
        """Read the parameters but those that forward writes, and note whether the caller's module holds them."""
        shown = read_shards(self.prepared, "local_parameters")
        with calling("module.named_parameters"):
            held = self._preparation.difference(shown)
        self.loads.note(HELD, held)
        return self._but_written(shown)

    def _but_written(self, shards: dict[str, _S]) -> dict[str, _S]:
        return {name: shard for name, shard in shards.items() if name not in self._written}

    def resume_in(self, fresh: Preparation | None, step: int, form: StateForm) -> None:
        """Continue with a fresh model, or with the same one whose parameters are lost; it first loads the state."""
        in_files = form in {StateForm.FILES, StateForm.CHECKPOINT}
        state, noted = {} if in_files else state_of(self.prepared, form), {}
        if in_files:
            write_files(self.prepared, form, self._context)
        if form is StateForm.WHOLE:
            noted = self.loads.handed_out(self.prepared, state, step)
            state = copied(state)  # as a file would hold it, whatever becomes of the model
        resume = self._training.resume
        if resume is not None and resume.undoes_a_step:
            self._step_aside(step)
        self.schedules = StepSchedules(self._training.optimizer, steps_done=step)
        successor = self.prepared if fresh is None else fresh.prepared
        lacks_schedules = resume is not None and resume.schedules_later
        with refusing():
            successor.optimizer(to_be_loaded(self.schedules.factory, lacks_schedules=lacks_schedules))
            if not lacks_schedules:
                self.schedules.follow(successor)
        if fresh is not None:  # else the model has the gradients that the loop has left, None or zeros
            self.prepared.close()
            fresh.settle()
            self._preparation = fresh
        self.loads.num += 1
        wipe(successor)
        self.scale_losses()  # before the load, which must leave the scaler alone
        freezes_first = resume is not None and resume.freezes_first
        if fresh is not None and freezes_first:
            self._freeze_again(step)
        if in_files:
            load_files(successor, form, self._context.folder)
        elif form is StateForm.WHOLE:
            self.loads.load_whole(self.prepared, state, step, noted)
        else:
            load_shares(successor, state)
        if lacks_schedules:
            self.loads.note_rates(successor)
            self.schedules.follow(successor)
        if fresh is not None and not freezes_first:
            self._freeze_again(step)
        with self.reading(step):
            loaded = self.read_parameters()
            if self._probes is not None:
                self._probes.follow(self.prepared)
                self._probes.shards(ValueKind.LOADED, step, loaded)
                self._probes.state(ValueKind.LOADED_STATE, step, self.prepared)

    def _freeze_again(self, step: int) -> None:
        """Freeze and thaw parts of a fresh model as of this step: the loop makes each change only once."""
        script = self._training.script
        for freeze in script.freezes if isinstance(script, Eventful) else ():
            if not freeze.for_good:
                freeze.apply(self.prepared.part, step)

    def _step_aside(self, step: int) -> None:
        """Take a step with the current model that is no part of the training, and leaves no trace in the ledger."""
        aside = _Loop(self._preparation, self._training, self._context, None)
        aside.schedules, aside._scaled = self.schedules, self._scaled
        aside.scale_losses()  # with a scaler of its own
        if self._probes is not None:
            self._probes.leave()
        with self._context.recorder.aside():
            aside.step(step, is_read=False)

    def step(self, step: int, *, is_read: bool) -> StepObservation:
        """Play the script, read gradients, update, read parameters."""
        if is_stepping(self._training.problem):
            return self._own_step(step, is_read=is_read)
        prepared, recorder, schedule = self.prepared, self._context.recorder, self._training.schedule
        facts = self.loads.take()
        scaled, is_skipped = self._scaled, schedule.is_skipped(step)
        scale = None if scaled is None else scaled.scaled
        if self._probes is not None:
            self._probes.factor = 1.0 if scaled is None else scaled.scale
        actor = EngineActor(prepared, self._training, self._context, step, self._inputs, self._watches, scale)
        actor.handed_out = partial(self.loads.handed_out, prepared, step=step)
        if goes_in_turn(self._training.script):
            actor.between = lambda: self._memory.take(
                self.prepared, actor, CensusTime.BETWEEN, self.loads.num
            )
        self._meet(step)
        with recorder.during(Phase.BETWEEN, step=step):
            if isinstance(prepared, _TakesSteps):
                prepared.play(actor)
            else:
                self._training.script.play(actor)
        self._meet(step)
        if self._ignored:
            with recorder.during(Phase.MODEL, step=step):
                facts += average_ignored(prepared, self._ignored)
        if self._census is not None:
            self._census.end_backwards()
        self._memory.take(self.prepared, actor, CensusTime.REDUCED, self.loads.num)
        norm = None
        self._probe_gradients(ValueKind.REDUCED, step)
        is_infinite = is_skipped and schedule.scaling is not None and schedule.scaling.in_one_piece
        if is_infinite:
            actor.overflow_in_one_piece()
        # Loops that do not clip leave it to the scaler's step, which may leave it to a fused kernel.
        unscales_later = scaled if schedule.clip is None else None
        if scaled is not None and unscales_later is None:
            with recorder.during(Phase.STEP, step=step):
                scaled.unscale()
            self._probe_gradients(ValueKind.UNSCALED, step)
        if schedule.clip is not None:
            with recorder.during(Phase.STEP, step=step):
                norm = read_norm(prepared, schedule.clip.max_norm, schedule.clip.norm_type)
            if is_infinite:
                actor.note(INFINITE_NORM, norm)
            if self._probes is not None and not is_skipped:
                self._probes.norm(step, norm)
            self._probe_gradients(ValueKind.CLIPPED, step)
        with self.reading(step):
            gradients = self._but_written(read_gradients(prepared)) if is_read and not is_skipped else {}
            gradients = self.keep(unscales_later.unscaled(gradients) if unscales_later else gradients)
        with recorder.during(Phase.STEP, step=step):
            if schedule.order is LoopOrder.ZERO_THEN_STEP:
                self._zero_grad(step)
            if scaled is not None:
                scaled.update()
            elif not is_skipped:
                prepared.step()
            self._memory.take(self.prepared, actor, CensusTime.STEPPED, self.loads.num)
            if schedule.order is LoopOrder.STEP_THEN_ZERO:
                self._zero_grad(step)
            self.schedules.step()
            self._memory.take(self.prepared, actor, CensusTime.CLEARED, self.loads.num)
            if self._lifetimes is not None:
                self._lifetimes.end_step()
        with self.reading(step):
            is_over = step == schedule.steps - 1
            parameters = self.keep(self.read_parameters()) if is_read or is_over else {}
            if self._probes is not None:
                self._probes.shards(ValueKind.UPDATED, step, parameters)
                self._probes.state(ValueKind.STATE, step, prepared)
            facts += [*self.loads.take(), *self._dtypes()]
            if scaled is not None:
                facts.append(Fact(moment="", subject=LOSS_SCALE, value=str(scaled.scale)))
        return StepObservation(
            losses=tuple(actor.log.losses),
            gradients=gradients,
            parameters=parameters,
            norm=None if is_skipped else norm,
            facts=(*facts, *actor.log.facts),
            snapshots=actor.log.snapshots,
        )

    def _dtypes(self) -> Iterator[Fact]:
        for unit, dtype in () if self._watches is None else self._watches.dtypes.take():
            yield Fact(moment=unit, subject=COMPUTED_IN, value=short_name(dtype))

    def _probe_gradients(self, kind: ValueKind, step: int) -> None:
        if self._probes is not None and not self._training.schedule.is_skipped(step):
            with self.reading(step):
                self._probes.gradients(kind, step, self.prepared)

    def _own_step(self, step: int, *, is_read: bool) -> StepObservation:
        """Run the user's own step, and read parameters."""
        problem, facts = self._training.problem, self.loads.take()
        assert isinstance(problem, UserModel)
        actor = EngineActor(self.prepared, self._training, self._context, step, self._inputs, self._watches)
        own = OwnStep(self.prepared, problem, actor)
        self._meet(step)
        with self._context.recorder.during(Phase.BETWEEN, step=step):
            own.play()
        self.schedules.step()
        if self._lifetimes is not None:
            self._lifetimes.end_step()
        is_over = step == self._training.schedule.steps - 1
        with self.reading(step):
            parameters = self.keep(self.read_parameters()) if is_read or is_over else {}
        facts += [*self.loads.take(), *self._dtypes(), *actor.log.facts]
        gradients = self.keep(own.gradients) if is_read else {}
        return StepObservation(
            losses=tuple(actor.log.losses),
            gradients=gradients,
            parameters=parameters,
            norm=None,
            facts=tuple(facts),
            snapshots={},
        )

    def _meet(self, step: int) -> None:
        if self._lifetimes is not None:
            with self._context.recorder.during(Phase.OBSERVE, step=step):
                self._lifetimes.meet(self.prepared, self._training.plan)

    def _zero_grad(self, step: int) -> None:
        self.prepared.zero_grad(set_to_none=self._training.schedule.clears_to_none(step))
