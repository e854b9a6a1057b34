"""Drives the pipeline stages of one rank: torch's schedules run the microbatches, the engine reduces the gradients.

[Note: who synchronises in a pipeline] Only the schedule determines which backward of a stage is its last. Torch's stage
recognizes three kinds of module by their class: its own DDP, FSDP2 and replicate. An engine with such a module returns
it from `PreparedModel.pipelined`. For every other engine the stage is a plain module, and our own stage uses a method
that the contract has anyway: `accumulating`. It is entered around each forward and each backward of all microbatches
but the last, each by itself, because the microbatches alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from shardproof.engine.contract import Engine, OptimizerFactory, Plan, PreparedModel, Shard
from shardproof.harness.cases.scripts.pipeline_order import Pipelined, PipelineOrder
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.units import num_stages, stages_of
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.tracing.unit_hooks import watching_units
from shardproof.harness.training.engine_actor import EngineActor
from shardproof.harness.worlds.rank import RankContext


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Target:
    inputs: tuple[torch.Tensor, ...] = ()
    target: torch.Tensor


def prepare_pipeline(
    context: RankContext, training: Training, adapter: Engine, mesh: DeviceMesh, data: DeviceMesh
) -> PreparedModel:
    """Let the engine prepare each stage of this rank on its data axes; ``mesh`` also has the axis of the pipeline."""
    problem, plan, count = training.problem, training.plan, num_stages(training)
    assert problem.stages is not None  # the training has checked this
    modules = problem.stages(problem.build(), count)
    widths = _between(training, modules, plan.data_rank(context.rank, context.size))
    stages = []
    for index in stages_of(training, context.rank, context.size):
        module = modules[index].to(context.device)
        if plan.cut_axis is not None and problem.parallelize is not None:
            problem.parallelize(module, mesh[plan.cut_axis])
        own = _part_of(plan, module)
        prepared = adapter.prepare(module, own, data)
        place = _Place(index=index, count=count, plan=own, ends=(widths[index], widths[index + 1]))
        stages.append(_Stage(prepared, place, training, context, mesh))
    return Pipeline(tuple(stages), training, context)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """The stage, the number of stages, the plan of its units, and examples of inputs and outputs."""

    index: int
    count: int
    plan: Plan
    ends: tuple[torch.Tensor, torch.Tensor]


class Pipeline(PreparedModel):
    """The stages of one rank as one prepared model, whose names are those of all stages together."""

    def __init__(self, stages: tuple[_Stage, ...], training: Training, context: RankContext) -> None:
        super().__init__(nn.Module())  # the stages are called and watched, not this module
        self._stages = stages
        self._prepared = tuple(stage.prepared for stage in stages)
        self._training = training
        self._context = context
        self._weight = 1.0
        self._schedule = self._scheduled()

    def play(self, actor: EngineActor) -> None:
        batches = [actor.batch(m) for m in range(actor.num_microbatches)]
        inputs = [torch.cat(pieces) for pieces in zip(*(b.inputs for b in batches), strict=True)]
        targets = torch.cat([b.target for b in batches])
        self._weight = actor.weight
        losses: list[torch.Tensor] = []
        recorder = self._context.recorder
        with ExitStack() as stack:
            for stage in self._stages:
                stage.step, module = actor.step, stage.prepared.named
                stack.enter_context(watching_units(module, stage.plan.units, recorder))
                if stage.plan.asks_for_dtypes:
                    stack.enter_context(actor.dtypes.watching(module, stage.plan))
            is_last = any(stage.is_last for stage in self._stages)
            self._schedule.step(
                *(inputs if any(stage.is_first for stage in self._stages) else ()),
                target=targets if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
            )
        actor.log.losses.extend(float(loss.detach()) for loss in losses)

    def optimizer(self, factory: OptimizerFactory) -> None:
        for prepared in self._prepared:
            prepared.optimizer(factory)

    def step(self) -> None:
        for prepared in self._prepared:
            prepared.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients of all stages."""
        for prepared in self._prepared:
            prepared.zero_grad(set_to_none=set_to_none)

    def local_parameters(self) -> Mapping[str, Shard]:
        return {name: shard for p in self._prepared for name, shard in p.local_parameters().items()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        return {name: shard for p in self._prepared for name, shard in p.local_gradients().items()}

    def local_buffers(self) -> Mapping[str, Shard]:
        return {name: shard for p in self._prepared for name, shard in p.local_buffers().items()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        return {name: shard for p in self._prepared for name, shard in p.local_optimizer_state().items()}

    def shared_state(self) -> dict[str, Any]:
        """Join the states of all stages: names are those of the whole model, options of groups those of one stage."""
        states = [prepared.shared_state() for prepared in self._prepared]
        return {
            "model": {name: value for state in states for name, value in state["model"].items()},
            "optimizer": {
                "state": {n: value for state in states for n, value in state["optimizer"]["state"].items()},
                "param_groups": [*map(_options, states[0]["optimizer"]["param_groups"])],
            },
        }

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Load its own part into each stage."""
        for prepared in self._prepared:
            own = prepared.shared_state()
            own["model"] = {name: state["model"][name] for name in own["model"]}
            of_all, optimizer = state["optimizer"], own["optimizer"]
            optimizer["state"] = {n: of_all["state"][n] for n in optimizer["state"]}
            for group, options in zip(optimizer["param_groups"], of_all["param_groups"], strict=True):
                group.update(options)
            prepared.load_shared_state(own)

    def _scheduled(self) -> Schedule1F1B | ScheduleInterleaved1F1B:
        script, count = self._training.script, self._training.schedule.microbatches
        assert isinstance(script, Pipelined)  # the training has checked this
        # The loss is weighted, so that the sum over microbatches is the mean over items: nothing is scaled afterwards.
        if script.order is PipelineOrder.INTERLEAVED:
            return ScheduleInterleaved1F1B(
                list(self._stages), count, loss_fn=self._weighted_loss, scale_grads=False
            )
        return Schedule1F1B(self._stages[0], count, loss_fn=self._weighted_loss, scale_grads=False)

    def _weighted_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._training.problem.loss_sum(output, _Target(target=target)) * self._weight


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group."""
    return {name: value for name, value in group.items() if name != "params"}


class _Called(nn.Module):
    """A prepared model for torch's stage: a module of no class that torch recognizes, without parameters."""

    def __init__(self, prepared: PreparedModel) -> None:
        super().__init__()
        self._prepared = prepared

    # Any: a stage's inputs and outputs are of any type.
    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._prepared(*inputs)


class _Stage(PipelineStage):
    """One stage that labels its calls and synchronizes by the contract; see [Note: who synchronises ...]."""

    def __init__(
        self,
        prepared: PreparedModel,
        place: _Place,
        training: Training,
        context: RankContext,
        mesh: DeviceMesh,
    ) -> None:
        own = prepared.pipelined()
        super().__init__(
            _Called(prepared) if own is None else own,
            place.index,
            place.count,
            context.device,
            # With both examples torch runs nothing to infer shapes: the first step is like all others.
            input_args=place.ends[0],
            output_args=place.ends[1],
            group=mesh.get_group("pipe"),
        )
        self.prepared = prepared
        self.plan = place.plan
        self.step = -1
        self._asks_us = own is None
        self._recorder: Recorder = context.recorder
        self._last = training.schedule.microbatches - 1

    # Any: as torch has it.
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch's forward."""
        with self._during(Phase.FORWARD, fwd_chunk_id), self._synchronisation(fwd_chunk_id == self._last):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one microbatch's backward."""
        with self._during(Phase.BACKWARD, bwd_chunk_id), self._synchronisation(last_backward):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Let torch's own engines reduce the gradients that they held back: part of the last backward."""
        with self._during(Phase.BACKWARD, self._last):
            super().perform_reduce_grad(grad_scale_factor)

    def _synchronisation(self, is_last: bool) -> AbstractContextManager[None]:
        return self.prepared.accumulating() if self._asks_us and not is_last else nullcontext()

    def _during(self, phase: Phase, microbatch: int) -> AbstractContextManager[None]:
        return self._recorder.during(phase, step=self.step, microbatch=microbatch)


def _part_of(plan: Plan, module: nn.Module) -> Plan:
    """Leave out the units of other stages."""
    known = dict(module.named_modules())
    return replace(plan, units=tuple(u for u in plan.units if all(name in known for name in u.split(","))))


def _between(training: Training, modules: tuple[nn.Module, ...], data_rank: int) -> list[torch.Tensor]:
    """Return an example of the values before each stage and after the last; all microbatches have its shape."""
    batch = training.problem.batch(step=0, microbatch=0, rank=data_rank)
    (rows,) = batch.inputs
    examples = [rows]
    with torch.no_grad():
        for module in modules:
            examples.append(module(examples[-1]))
    dtype = training.plan.compute_dtype  # of tensors that cross between stages
    return [rows, *(torch.empty_like(example, dtype=dtype).requires_grad_() for example in examples[1:])]
