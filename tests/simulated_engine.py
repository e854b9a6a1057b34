"""An N-rank engine simulated in one process, honest or with a defect: observations without a world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from shardproof import Evidence, Layout, Shard
from shardproof.harness.cases.training import LoopOrder, Training, ZeroGrad, loss_weight
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.observation import Observation, StepObservation

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moment:
    """The position of a simulated rank that reduces one parameter's gradient."""

    step: int
    rank: int
    name: str
    previous: torch.Tensor | None  # the result of this rank's reduction in the step before


class Honest:
    """Averages in a ring: each chunk of the gradient starts its sum at another rank, as real rings do."""

    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        """Reduce ``pieces`` [microbatches, ranks, ...] to this rank's gradient."""
        return ring_mean(accumulate(pieces))

    def updated(self, before: torch.Tensor, after: torch.Tensor, moment: Moment) -> torch.Tensor:
        """Return a parameter after the optimizer step."""
        return after


def accumulate(pieces: torch.Tensor) -> torch.Tensor:
    """Add microbatches one after the other, as autograd does."""
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def ring_mean(of_ranks: torch.Tensor) -> torch.Tensor:
    """Average over dim 0, every chunk in the order of a ring."""
    num_ranks = len(of_ranks)
    flat = of_ranks.reshape(num_ranks, -1)
    chunks = []
    for start, chunk in enumerate(flat.chunk(num_ranks, dim=1)):
        total = chunk[start]
        for hop in range(1, num_ranks):
            total = total + chunk[(start + hop) % num_ranks]
        chunks.append(total / num_ranks)
    return torch.cat(chunks).reshape(of_ranks.shape[1:])


def simulate(
    training: Training, world_size: int, engine: Honest | None = None, layout: Layout = Layout.SHARD
) -> tuple[Observation, ...]:
    """Train as ``world_size`` ranks with ``engine``, and observe each of them, sharded by rows if asked."""
    simulation = _Simulation(training, world_size, engine or Honest(), layout)
    initial = [simulation.read(rank, simulation.parameters(rank)) for rank in range(world_size)]
    steps = [simulation.run_step(step) for step in range(training.schedule.steps)]
    return tuple(
        Observation(
            rank=rank,
            input_digest=f"inputs of rank {rank}",
            initial=initial[rank],
            steps=tuple(of_ranks[rank] for of_ranks in steps),
            optimizer_state=simulation.read(rank, simulation.state(rank)),
            buffers={n: whole(b) for n, b in simulation.models[rank].named_buffers()},
            ledger=(),
        )
        for rank in range(world_size)
    )


oracle_of = cache(run_oracle)


def evidence_of(
    training: Training,
    world_size: int = 2,
    engine: Honest | None = None,
    layout: Layout = Layout.SHARD,
    *,
    ranks: tuple[Observation, ...] | None = None,
    oracle: OracleObservation | None = None,
) -> Evidence:
    """Return the evidence of a simulated training, with these observations and this oracle unless they are None."""
    return Evidence(
        training=training,
        world_size=world_size,
        ranks=simulate(training, world_size, engine, layout) if ranks is None else ranks,
        oracle=oracle or oracle_of(training, world_size),
    )


def whole(tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    return Shard(tensor=tensor.detach().clone(), offsets=(0,) * len(shape), global_shape=shape)


def row_shard(tensor: torch.Tensor, rank: int, world_size: int) -> Shard:
    """Return the rows of ``rank`` by torch.chunk's rule; a scalar stays whole."""
    if tensor.dim() == 0:
        return whole(tensor)
    rows = -(-tensor.shape[0] // world_size)
    start = min(rank * rows, tensor.shape[0])
    return Shard(
        tensor=tensor.detach()[start : start + rows].clone(),
        offsets=(start, *(0 for _ in tensor.shape[1:])),
        global_shape=tuple(tensor.shape),
    )


class _Simulation:
    """All ranks of one training: a model and an optimizer each."""

    def __init__(self, training: Training, world_size: int, engine: Honest, layout: Layout) -> None:
        self.training, self.world_size, self.engine, self.layout = training, world_size, engine, layout
        self.models: list[nn.Module] = [training.problem.build() for _ in range(world_size)]
        self.optimizers = [training.optimizer(model.parameters()) for model in self.models]
        self.previous: dict[tuple[int, str], torch.Tensor] = {}

    def parameters(self, rank: int) -> Tensors:
        return dict(self.models[rank].named_parameters())

    def state(self, rank: int) -> Tensors:
        return {
            f"{name}/{key}": value
            for name, p in self.models[rank].named_parameters()
            for key, value in self.optimizers[rank].state.get(p, {}).items()
        }

    def read(self, rank: int, tensors: Tensors) -> dict[str, Shard]:
        if self.layout is Layout.REPLICATE:
            return {name: whole(t) for name, t in tensors.items()}
        # HYBRID: the default of plans, two replicas, each sharded over half of the ranks.
        num_shards = self.world_size // 2 if self.layout is Layout.HYBRID else self.world_size
        return {name: row_shard(t, rank % num_shards, num_shards) for name, t in tensors.items()}

    def run_step(self, step: int) -> list[StepObservation]:
        losses, pieces = self._forward_backward(step)
        seen = []
        for rank, model in enumerate(self.models):
            for name, p in model.named_parameters():
                moment = self._moment(step, rank, name)
                reduced = self.engine.gradient(pieces[name], moment)
                p.grad = reduced if reduced is None or p.grad is None else p.grad + reduced
                if reduced is not None:
                    self.previous[rank, name] = reduced.clone()
            gradients = {n: p.grad for n, p in model.named_parameters()}
            read = self.read(rank, {n: g for n, g in gradients.items() if g is not None})
            self._update(step, rank)
            seen.append(
                StepObservation(
                    losses=tuple(losses[rank]),
                    gradients={name: read.get(name) for name in gradients},
                    parameters=self.read(rank, self.parameters(rank)),
                )
            )
        return seen

    def _forward_backward(self, step: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
        weight = loss_weight(self.training, self.world_size, step)
        problem = self.training.problem
        losses: list[list[float]] = [[] for _ in self.models]
        by_name: dict[str, list[list[torch.Tensor]]] = {n: [] for n in self.parameters(0)}
        for microbatch in range(self.training.schedule.microbatches):
            for of_ranks in by_name.values():
                of_ranks.append([])
            for rank, model in enumerate(self.models):
                batch = problem.batch(step=step, microbatch=microbatch, rank=rank)
                loss = problem.loss_sum(model(*batch.inputs), batch) * weight
                losses[rank].append(loss.item())
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                for of_ranks, gradient in zip(by_name.values(), gradients, strict=True):
                    of_ranks[-1].append(gradient)
        stacked = {n: torch.stack([torch.stack(rs) for rs in ms]) for n, ms in by_name.items()}
        return losses, stacked

    def _update(self, step: int, rank: int) -> None:
        before = {n: p.detach().clone() for n, p in self.models[rank].named_parameters()}
        schedule, optimizer = self.training.schedule, self.optimizers[rank]
        to_none = schedule.zero_grad is ZeroGrad.SET_TO_NONE or step % 2 == 0
        if schedule.order is LoopOrder.ZERO_THEN_STEP:
            optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
        if schedule.order is LoopOrder.STEP_THEN_ZERO:
            optimizer.zero_grad(set_to_none=to_none)
        with torch.no_grad():
            for name, p in self.models[rank].named_parameters():
                p.copy_(self.engine.updated(before[name], p.clone(), self._moment(step, rank, name)))

    def _moment(self, step: int, rank: int, name: str) -> Moment:
        return Moment(step=step, rank=rank, name=name, previous=self.previous.get((rank, name)))
