"""Driving one rank: the training loop around an engine, its phases labelled, its observation kept."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.contract import Accumulation, PreparedModel, Shard, UnsupportedError
from engine.registry import resolve
from harness.case import Batch, LoopOrder, Training, ZeroGrad
from harness.errors import EngineError
from harness.keep import observation_path
from harness.ledger.entry import Phase
from harness.loss import loss_weight
from harness.observation import Observation, StepObservation, save_observation
from harness.unit_hooks import watching_units
from harness.worlds.rank import RankContext

__all__ = ["drive_rank", "train"]

# Where an engine draws from the default generator, ranks draw differently unless the engine sees to it.
_RANK_SEED = 1000
# How an engine says no. Other errors are accidents, even where the plan is beyond what it declares.
_REFUSALS = (UnsupportedError, NotImplementedError, ValueError)


def drive_rank(context: RankContext, training: Training, engine: str) -> str | None:
    """Train on this rank under the engine of that name and keep what was observed; a world's rank body.

    Returns the engine's words if it refused the plan, which it may do in prepare alone, else None. A refusal
    is not raised: that would stop the other ranks, and whether they refuse too is what has to be seen.
    """
    torch.manual_seed(_RANK_SEED + context.rank)
    adapter = resolve(engine)
    mesh = _mesh(context, training)
    model = training.problem.build().to(context.device)
    try:
        prepared = adapter.prepare(model, training.plan, mesh)
    except _REFUSALS as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    with watching_units(prepared.named, training.plan.units, context.recorder):
        observation = train(prepared, training, context)
    save_observation(observation, observation_path(context.folder, context.rank))
    return None


def train(prepared: PreparedModel, training: Training, context: RankContext) -> Observation:
    """Run the whole schedule: steps of microbatches, gradients read before the optimizer steps."""
    recorder = context.recorder
    loop = _Loop(prepared, training, context)
    prepared.optimizer(training.optimizer)
    with recorder.during(Phase.OBSERVE):
        initial = _copies(prepared.local_parameters())
    steps = tuple(loop.step(step) for step in range(training.schedule.steps))
    with recorder.during(Phase.OBSERVE):
        return Observation(
            rank=context.rank,
            input_digest=loop.input_digest,
            initial=initial,
            steps=steps,
            optimizer_state=_copies(prepared.local_optimizer_state()),
            buffers=_copies(prepared.local_buffers()),
            ledger=recorder.ledger(),
        )


class _Loop:
    """One rank's training loop."""

    def __init__(self, prepared: PreparedModel, training: Training, context: RankContext) -> None:
        self._prepared = prepared
        self._training = training
        self._context = context
        self._inputs = hashlib.sha256()

    @property
    def input_digest(self) -> str:
        """Hash of every input so far."""
        return self._inputs.hexdigest()

    def step(self, step: int) -> StepObservation:
        prepared, recorder = self._prepared, self._context.recorder
        schedule = self._training.schedule
        weight = loss_weight(self._training, self._context.size, step)
        losses = tuple(self._microbatch(step, m, weight) for m in range(schedule.microbatches))
        with recorder.during(Phase.OBSERVE, step=step):
            gradients = {
                name: None if shard is None else _copy(shard)
                for name, shard in prepared.local_gradients().items()
            }
        with recorder.during(Phase.STEP, step=step):
            if schedule.order is LoopOrder.ZERO_THEN_STEP:
                self._zero_grad(step)
            prepared.step()
            if schedule.order is LoopOrder.STEP_THEN_ZERO:
                self._zero_grad(step)
        with recorder.during(Phase.OBSERVE, step=step):
            parameters = _copies(prepared.local_parameters())
        return StepObservation(losses=losses, gradients=gradients, parameters=parameters)

    def _microbatch(self, step: int, microbatch: int, weight: float) -> float:
        recorder, rank = self._context.recorder, self._context.rank
        problem = self._training.problem
        batch = problem.batch(step=step, microbatch=microbatch, rank=rank)
        inputs = self._take(batch)
        with self._synchronisation(microbatch):
            with recorder.during(Phase.FORWARD, step=step, microbatch=microbatch):
                loss = problem.loss_sum(self._prepared(*inputs), batch) * weight
            with recorder.during(Phase.BACKWARD, step=step, microbatch=microbatch):
                self._prepared.backward(loss)
        return float(loss.detach())

    def _take(self, batch: Batch) -> Sequence[torch.Tensor]:
        for tensor in batch.inputs:
            plain = tensor.contiguous()
            self._inputs.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
        return [tensor.to(self._context.device) for tensor in batch.inputs]

    def _synchronisation(self, microbatch: int) -> AbstractContextManager[None]:
        is_last = microbatch == self._training.schedule.microbatches - 1
        if is_last or self._training.plan.accumulation is Accumulation.EVERY_MICROBATCH:
            return nullcontext()
        return self._prepared.accumulating()

    def _zero_grad(self, step: int) -> None:
        alternate = self._training.schedule.zero_grad is ZeroGrad.ALTERNATE
        self._prepared.zero_grad(set_to_none=not (alternate and step % 2))


def _copies(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    return {name: _copy(shard) for name, shard in shards.items()}


def _copy(shard: Shard) -> Shard:
    """Keep what was read as it was read, whatever the adapter handed out, in a plain tensor on the CPU."""
    if type(shard.tensor) not in {torch.Tensor, torch.nn.Parameter}:
        raise EngineError(
            "PreparedModel.local_*",
            expected="shards of plain tensors",
            got=type(shard.tensor).__name__,
            hint="shard_of, which takes DTensors apart",
        )
    return replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True))


def _mesh(context: RankContext, training: Training) -> DeviceMesh:
    axes = training.plan.axes(context.size)
    mesh = init_device_mesh(
        context.device.type,
        tuple(axis.size for axis in axes),
        mesh_dim_names=tuple(axis.name for axis in axes),
    )
    context.recorder.name_axes({mesh.get_group(axis.name).group_name: axis.name for axis in axes})
    return mesh
