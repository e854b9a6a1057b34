"""Driving one rank: the training loop around an engine, its phases labelled, its observation kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.engine.contract import (
    Capability,
    Cut,
    Engine,
    Masters,
    NoGradient,
    Plan,
    PreparedModel,
    Shard,
    UnsupportedError,
)
from shardproof.engine.registry import resolve
from shardproof.harness.cases.training import (
    AS_HANDED_OUT,
    AS_HELD,
    HANDED_OUT,
    LOADED,
    LOSS_SCALE,
    TAKEN,
    UNCHANGED,
    LoopOrder,
    StateForm,
    Training,
    Watch,
)
from shardproof.harness.cases.user_model import StepSchedules
from shardproof.harness.records.observation import (
    Fact,
    Observation,
    StepObservation,
    digest,
    save_observation,
)
from shardproof.harness.records.world_result import arcs_path, observation_path
from shardproof.harness.torch_compat.profiler_labels import idle_labels
from shardproof.harness.tracing.arcs import counting_arcs
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.memory.census import Census
from shardproof.harness.tracing.memory.census_report import CensusTime
from shardproof.harness.tracing.races.fake_cuda import cuda_stand_in
from shardproof.harness.tracing.unit_hooks import watching_states, watching_units
from shardproof.harness.training.engine_actor import EngineActor
from shardproof.harness.training.layout_memory import Form, explained
from shardproof.harness.training.loss_scale import ScaledSteps
from shardproof.harness.training.reads import calling, read_declared, read_gradients, read_norm, read_shards
from shardproof.harness.training.watches import Watches, watching
from shardproof.harness.training.whole_state import changed, copied, difference_of_state, tensors_of
from shardproof.harness.worlds.exception_outcome import kind_of, text_of
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import DEVICES_OF_CUDA

__all__ = ["drive_rank", "train"]

_S = TypeVar("_S", Shard, Shard | None)

# Where an engine draws from the default generator, ranks draw differently unless the engine sees to it.
_RANK_SEED = 1000
# How an engine says no. Other errors are accidents, even where the plan is beyond what it declares.
_REFUSALS = (UnsupportedError, NotImplementedError, ValueError)


def drive_rank(context: RankContext, training: Training, engine: str) -> str | None:
    """Train on this rank under the engine of that name and keep what was observed; a world's rank body.

    Returns the engine's words if it refused the plan, which it may do until it has an optimizer, else None. A refusal
    is not raised: that would stop the other ranks, and whether they refuse too is what has to be seen.
    """
    adapter = resolve(engine)
    if adapter.needs_processes and context.shares_a_process:
        return "NeedsProcesses: ranks of this world are threads of one process"
    if adapter.insists_on_cuda and context.device.type not in DEVICES_OF_CUDA:
        return f"NeedsCuda: ranks of this world are on {context.device.type}"
    is_counted = Watch.ARCS in training.watch and context.rank == 0  # one counter to a process
    with counting_arcs(adapter, arcs_path(context.folder)) if is_counted else nullcontext():
        return _drive(context, training, adapter)


def _drive(context: RankContext, training: Training, adapter: Engine) -> str | None:
    is_measured = Watch.ALLOCATOR in training.watch and not context.shares_a_process
    census = Census(context.recorder, is_process_measured=is_measured) if training.is_counted else None
    schedule = training.schedule
    try:
        with (
            watching(training.watch, context.recorder, context.device.type, census=census) as watches,
            idle_labels,
            cuda_stand_in() if adapter.insists_on_cuda and context.device.type == "cpu" else nullcontext(),
        ):
            # Numbers of a simulated rank mean nothing: what it holds in the end shows where its shards lie.
            reads = [not context.is_simulated] + [schedule.are_repeats_read] * (schedule.repeats - 1)
            first, *others = (_run(context, training, adapter, watches, is_read=read) for read in reads)
    except _RefusedError as refusal:
        return str(refusal)
    repeated = (first, *others) if others else ()
    observation = replace(
        first,
        repeat_digests=tuple(
            digest(seen if schedule.are_repeats_read else _end_of(seen)) for seen in repeated
        ),
        race_report=None if watches.races is None else watches.races.report(),
        lifetime_report=None if watches.lifetimes is None else watches.lifetimes.report(),
    )
    save_observation(observation, observation_path(context.folder, context.rank))
    return None


def _end_of(observation: Observation) -> Observation:
    """Return what a training shows that is read at its end alone."""
    *steps, last = observation.steps
    unread = tuple(replace(step, gradients={}, parameters={}) for step in steps)
    return replace(observation, initial={}, steps=(*unread, replace(last, gradients={})))


@runtime_checkable
class _TakesSteps(Protocol):
    """A prepared model that has a schedule of its own for the microbatches of a step, as a pipeline has."""

    def play(self, actor: EngineActor) -> None:
        """Take all microbatches of a step."""


class _RefusedError(Exception):
    """The engine refused the plan before training."""


def _run(
    context: RankContext, training: Training, adapter: Engine, watches: Watches, *, is_read: bool
) -> Observation:
    torch.manual_seed(_RANK_SEED + context.rank)
    prepared = _prepare(context, training, adapter, training.plan, watches)
    with ExitStack() as stack:
        stack.enter_context(watching_units(prepared.named, training.plan.units, context.recorder))
        if Watch.UNITS in training.watch:
            stack.enter_context(watching_states(prepared.units(), context.recorder))
        return train(prepared, training, context, adapter, watches, is_read=is_read)


def _prepare(
    context: RankContext, training: Training, adapter: Engine, plan: Plan, watches: Watches | None = None
) -> PreparedModel:
    # What the user's mesh knows of its ranks is not the engine's to explain.
    with context.recorder.during(Phase.OBSERVE):
        mesh = _mesh(context, plan)
    data = mesh if mesh.mesh_dim_names == plan.data_axes else mesh[plan.data_axes]
    with _refusing():
        if plan.pipeline_stages > 1:
            from shardproof.harness.training.pipeline import (
                prepare_pipeline,  # here, because torch's part of it imports slowly
            )

            return prepare_pipeline(context, training, adapter, mesh, data)
        if watches is not None and watches.census is not None:
            watches.census.measure_process()
        has_memory = Capability.META not in plan.demands
        model = training.problem.build().to(context.device if has_memory else "meta")
        if plan.cut_axis is not None and training.problem.parallelize is not None:
            training.problem.parallelize(model, mesh[plan.cut_axis])
        if watches is not None:
            watches.form = Form.of(model, training)
        prepared = adapter.prepare(model, plan, data)
        if not has_memory:
            state = training.problem.build().state_dict() if context.rank == 0 else {}
            prepared.materialize(context.device, state)
        return prepared


@contextmanager
def _refusing() -> Iterator[None]:
    """Take the errors by which an engine refuses for a refusal."""
    try:
        yield
    except _REFUSALS as refusal:
        raise _RefusedError(f"{kind_of(refusal)}: {text_of(refusal)}") from refusal


def train(
    prepared: PreparedModel,
    training: Training,
    context: RankContext,
    adapter: Engine | None = None,
    watches: Watches | None = None,
    *,
    is_read: bool = True,
) -> Observation:
    """Run the whole schedule; ``adapter`` is needed where the training resumes in a fresh model.

    Unless ``is_read``, nothing is asked of the engine before the last step is done.

    ``watches`` learn from the loop what they cannot see: the owner of a tensor, and the end of a step.
    """
    if training.convert is not None:
        prepared.convert(training.convert)
    loop = _Loop(prepared, training, context, watches)
    with _refusing():
        if training.schedule.steps_in_backward:
            prepared.optimizer_in_backward(loop.schedules.factory)
        else:
            prepared.optimizer(loop.schedules.factory)
    loop.scale_losses()
    with loop.reading():
        initial = loop.kept(read_shards(prepared, "local_parameters")) if is_read else {}
    steps = []
    for step in range(training.schedule.steps):
        if training.resume is not None and step == training.resume.after_steps and adapter is not None:
            plan = training.resume.plan
            successor = loop.prepared if plan is None else _prepare(context, training, adapter, plan)
            loop.resume_in(successor, step)
            loop.scale_losses()
        steps.append(loop.step(step, is_read=is_read))
    with loop.reading():
        return Observation(
            rank=context.rank,
            input_digest=loop.input_digest,
            initial=initial,
            steps=tuple(steps),
            optimizer_state=read_shards(loop.prepared, "local_optimizer_state"),
            buffers=read_shards(loop.prepared, "local_buffers"),
            ledger=(),  # in the journal
            cut=read_declared(loop.prepared, "cut", Cut),
            no_gradient=read_declared(loop.prepared, "no_gradient", NoGradient),
            masters=read_declared(loop.prepared, "masters", Masters),
            counts=() if watches is None or watches.census is None else watches.census.counts,
        )


class _Loop:
    """One rank's training loop."""

    def __init__(
        self,
        prepared: PreparedModel,
        training: Training,
        context: RankContext,
        watches: Watches | None,
    ) -> None:
        self.prepared = prepared
        self.schedules = StepSchedules(training.optimizer)
        self._training = training
        self._context = context
        self._watches = watches
        self._lifetimes = None if watches is None else watches.lifetimes
        self._census = None if watches is None else watches.census
        self._inputs = hashlib.sha256()
        self._facts: tuple[Fact, ...] = ()  # of what came before the step
        self._scaled: ScaledSteps | None = None

    @property
    def input_digest(self) -> str:
        """Hash of all data so far."""
        return self._inputs.hexdigest()

    def kept(self, shards: dict[str, _S]) -> dict[str, _S]:
        """Report to the census, where there is one, what the harness itself keeps in memory from now on."""
        if self._census is not None:
            self._census.observed_bytes += sum(
                shard.tensor.nbytes for shard in shards.values() if shard is not None
            )
        return shards

    @contextmanager
    def reading(self, step: int = -1) -> Iterator[None]:
        """Observe inside: label what is issued, and keep reads from the census."""
        with (
            self._context.recorder.during(Phase.OBSERVE, step=step),
            nullcontext() if self._watches is None else self._watches.reading(),
        ):
            yield

    def scale_losses(self) -> None:
        """Make a gradient scaler for the model at hand, with the state of the one before, if the schedule has one."""
        scaling = self._training.schedule.scaling
        if scaling is not None:
            self._scaled = ScaledSteps(self.prepared, scaling, self._scaled)

    def resume_in(self, successor: PreparedModel, step: int) -> None:
        """Go on with another prepared model, or the same one anew, which takes over the state of this one."""
        form = StateForm.WHOLE if self._training.resume is None else self._training.resume.form
        with calling("full_state" if form is StateForm.WHOLE else "shared_state"):
            state = self.prepared.full_state() if form is StateForm.WHOLE else self.prepared.shared_state()
        handed_out = self._difference_from(state, step) if form is StateForm.WHOLE else ""
        folder = self._context.folder / "state"
        if form is StateForm.FILES:
            # Here, because it imports slowly.
            from torch.distributed.checkpoint.state_dict_saver import save

            save(state, checkpoint_id=folder)
        self.schedules = StepSchedules(self._training.optimizer, steps_done=step)
        with _refusing():
            successor.optimizer(self.schedules.factory)
        if successor is self.prepared:
            # Where there are gradients torch takes the state of a new optimizer for made.
            successor.zero_grad(set_to_none=True)
            with torch.no_grad():
                for parameter in successor.owned_parameters().values():
                    parameter.zero_()
        self.prepared = successor
        if form is StateForm.WHOLE:
            self._load_whole(state, step, handed_out)
            return
        if form is StateForm.FILES:
            from torch.distributed.checkpoint.state_dict_loader import load

            state = successor.shared_state()
            load(state, checkpoint_id=folder)
        with calling("load_shared_state"):
            successor.load_shared_state(state)

    # Any: states are nested dicts and lists of tensors and other values.
    def _load_whole(self, state: dict[str, Any], step: int, handed_out: str) -> None:
        """Load, and note whether the ranks held what was handed out, hold it now, and left the state as it was."""
        kept = copied(state)
        with calling("load_full_state"):
            self.prepared.load_full_state(state)
        lost = changed(tensors_of(kept), tensors_of(state))
        taken = self._difference_from(kept, step)
        noted = {
            HANDED_OUT: handed_out or AS_HELD,
            LOADED: f"{lost} changed" if lost else UNCHANGED,
            TAKEN: taken or AS_HANDED_OUT,
        }
        self._facts = tuple(Fact(moment="", subject=subject, value=value) for subject, value in noted.items())

    def _difference_from(self, state: dict[str, Any], step: int) -> str:
        """Return the first difference between a whole state and this rank's shards, under the model's own names."""
        with self.reading(step):
            return difference_of_state(self.prepared, state, self._names_of_state)

    @cached_property
    def _names_of_state(self) -> frozenset[str]:
        return frozenset(self._training.problem.build().state_dict())

    def step(self, step: int, *, is_read: bool) -> StepObservation:
        """Play the script, read gradients, update, read parameters."""
        prepared, recorder, schedule = self.prepared, self._context.recorder, self._training.schedule
        facts, self._facts = self._facts, ()
        scaled, is_skipped = self._scaled, schedule.is_skipped(step)
        scale = None if scaled is None else scaled.scaled
        actor = EngineActor(prepared, self._training, self._context, step, self._inputs, self._watches, scale)
        self._meet(step)
        with recorder.during(Phase.BETWEEN, step=step):
            if isinstance(prepared, _TakesSteps):
                prepared.play(actor)
            else:
                self._training.script.play(actor)
        self._meet(step)
        self._count(actor, CensusTime.REDUCED)
        norm = None
        if scaled is not None:
            with recorder.during(Phase.STEP, step=step):
                scaled.unscale()
        if schedule.clip is not None:
            with recorder.during(Phase.STEP, step=step):
                norm = read_norm(prepared, schedule.clip.max_norm, schedule.clip.norm_type)
        with self.reading(step):
            gradients = self.kept(read_gradients(prepared)) if is_read and not is_skipped else {}
        with recorder.during(Phase.STEP, step=step):
            if schedule.order is LoopOrder.ZERO_THEN_STEP:
                self._zero_grad(step)
            if scaled is None:
                prepared.step()
            else:
                scaled.update()
            self.schedules.step()
            self._count(actor, CensusTime.STEPPED)
            if schedule.order is LoopOrder.STEP_THEN_ZERO:
                self._zero_grad(step)
            self._count(actor, CensusTime.CLEARED)
            if self._lifetimes is not None:
                self._lifetimes.end_step()
        with self.reading(step):
            is_over = step == schedule.steps - 1
            parameters = self.kept(read_shards(prepared, "local_parameters")) if is_read or is_over else {}
            if scaled is not None:
                facts = (*facts, Fact(moment="", subject=LOSS_SCALE, value=str(scaled.scale)))
        return StepObservation(
            losses=tuple(actor.tape.losses),
            gradients=gradients,
            parameters=parameters,
            norm=None if is_skipped else norm,
            facts=(*facts, *actor.tape.facts),
            snapshots=actor.tape.snapshots,
        )

    def _count(self, actor: EngineActor, moment: CensusTime) -> None:
        form = None if self._watches is None else self._watches.form
        if self._census is not None and form is not None and actor.is_at_rest:
            with self.reading(actor.step):
                self._census.take(actor.step, moment, lambda: self._explained(form))

    def _explained(self, form: Form) -> int:
        """Add up what the layout explains, and what the engine shows of optimizer state; the law trusts no engine."""
        shown = read_shards(self.prepared, "local_optimizer_state")
        state = sum(shard.tensor.nbytes for shard in shown.values())
        size, cut = self._context.size, read_declared(self.prepared, "cut", Cut)
        masters = read_declared(self.prepared, "masters", Masters)
        return explained(form, self._training, size, cut=cut, state=state, masters=masters).num_bytes

    def _meet(self, step: int) -> None:
        if self._lifetimes is not None:
            with self._context.recorder.during(Phase.OBSERVE, step=step):
                self._lifetimes.meet(self.prepared, self._training.plan)

    def _zero_grad(self, step: int) -> None:
        self.prepared.zero_grad(set_to_none=self._training.schedule.clears_to_none(step))


def _mesh(context: RankContext, plan: Plan) -> DeviceMesh:
    """Make the mesh of all axes; the engine is given that of its own, which tensors and stages are not."""
    axes = plan.axes(context.size)
    mesh = init_device_mesh(
        context.device.type,
        tuple(axis.size for axis in axes),
        mesh_dim_names=tuple(axis.name for axis in axes),
    )
    context.recorder.name_axes({mesh.get_group(axis.name).group_name: axis.name for axis in axes})
    return mesh
