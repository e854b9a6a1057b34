"""The oracle: the same training on one process with no communication, in float64, with its float32 noise.

It knows nothing of engines and compares nothing; ``harness.parity`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import nn

from engine.contract import Plan
from harness.case import LoopOrder, Training, ZeroGrad
from harness.loss import loss_weight
from harness.summation import EXACT_ORDER, Summation, num_reorderings, reordering

__all__ = ["INITIAL_STEP", "LOSSES", "OracleObservation", "OracleStep", "Place", "Quantity", "run_oracle"]

Tensors = Mapping[str, torch.Tensor]

INITIAL_STEP = -1  # the step of what is seen before the first step
LOSSES = "loss"  # the name under which a step's losses are one tensor [microbatches, world size]


class Quantity(StrEnum):
    """What is compared; within a step in this order."""

    INITIAL = "initial parameter"
    LOSS = "loss"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of a training: what it is, after which step, and its name."""

    quantity: Quantity
    step: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OracleStep:
    """One optimizer step of the oracle.

    ``losses`` is [microbatches, world size]. ``contributions[name][m, r]`` is the gradient of rank r's loss
    of microbatch m as that rank computes it, before any averaging: summed over both and divided by the
    plan's divisor they are the step's gradient. ``gradients`` is what the optimizer finds, None where there is none.
    """

    losses: torch.Tensor
    contributions: Tensors
    gradients: Mapping[str, torch.Tensor | None]
    parameters: Tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OracleObservation:
    """What a right engine computes, in float64, and how far float32 may stray from it.

    ``buffers`` has one entry per rank: those after all of that rank's forwards. ``noise`` is, per tensor, the
    largest absolute deviation from the float64 value over float32 runs whose sums are taken in other orders.
    ``dtypes`` are those of the float32 runs, with ``INITIAL_STEP`` for every place. ``is_exact`` says that the
    problem claims to be exact, the world is a power of two, and no float32 run deviated in a single bit.
    """

    world_size: int
    plan: Plan
    initial: Tensors
    steps: tuple[OracleStep, ...]
    optimizer_state: Tensors
    buffers: tuple[Tensors, ...]
    noise: Mapping[Place, float]
    dtypes: Mapping[Place, torch.dtype]
    is_exact: bool

    @property
    def divisor(self) -> float:
        """What sums of gradients over ranks are divided by."""
        return self.plan.divisor(self.world_size)

    def reference(self, quantity: Quantity, step: int, rank: int) -> Mapping[str, torch.Tensor | None]:
        """Give the full tensors of one quantity after ``step``; ``rank`` matters for buffers alone."""
        match quantity:
            case Quantity.INITIAL:
                return self.initial
            case Quantity.LOSS:
                return {LOSSES: self.steps[step].losses}
            case Quantity.GRADIENT:
                return self.steps[step].gradients
            case Quantity.PARAMETER:
                return self.steps[step].parameters
            case Quantity.OPTIMIZER_STATE:
                return self.optimizer_state
            case Quantity.BUFFER:
                return self.buffers[rank]

    def dtype(self, quantity: Quantity, name: str) -> torch.dtype:
        """Give the dtype that an engine's tensor must have."""
        return self.dtypes[Place(quantity=quantity, step=INITIAL_STEP, name=name)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """One training in one dtype and order of summation."""

    initial: Tensors
    steps: tuple[OracleStep, ...]
    optimizer_state: Tensors
    buffers: tuple[Tensors, ...]

    def tensors(self) -> dict[Place, torch.Tensor]:
        """List every tensor; buffers of all ranks are one tensor, since their noise is judged together."""
        last = len(self.steps) - 1
        places = [(Quantity.INITIAL, INITIAL_STEP, name, t) for name, t in self.initial.items()]
        for step, seen in enumerate(self.steps):
            places.append((Quantity.LOSS, step, LOSSES, seen.losses))
            places += [(Quantity.GRADIENT, step, n, t) for n, t in seen.gradients.items() if t is not None]
            places += [(Quantity.PARAMETER, step, n, t) for n, t in seen.parameters.items()]
        places += [(Quantity.OPTIMIZER_STATE, last, n, t) for n, t in self.optimizer_state.items()]
        for name in self.buffers[0]:
            together = torch.stack([of_rank[name] for of_rank in self.buffers])
            places.append((Quantity.BUFFER, last, name, together))
        return {Place(quantity=q, step=s, name=n): t for q, s, n, t in places}


def run_oracle(training: Training, world_size: int) -> OracleObservation:
    """Train once in float64 and a few times in float32 with other orders of summation; never communicates."""
    exact = _train(training, world_size, EXACT_ORDER)
    noisy = [
        _train(training, world_size, reordering(k, training.plan))
        for k in range(num_reorderings(training.plan))
    ]
    noise = _largest_deviation(exact.tensors(), [run.tensors() for run in noisy])
    is_power_of_two = world_size & (world_size - 1) == 0
    return OracleObservation(
        world_size=world_size,
        plan=training.plan,
        initial=exact.initial,
        steps=exact.steps,
        optimizer_state=exact.optimizer_state,
        buffers=exact.buffers,
        noise=noise,
        dtypes={
            Place(quantity=place.quantity, step=INITIAL_STEP, name=place.name): tensor.dtype
            for place, tensor in noisy[0].tensors().items()
        },
        is_exact=training.problem.is_exact and is_power_of_two and not any(noise.values()),
    )


def _largest_deviation(
    exact: dict[Place, torch.Tensor], runs: list[dict[Place, torch.Tensor]]
) -> dict[Place, float]:
    return {
        place: max(_distance(run[place], value) for run in runs) if value.numel() else 0.0
        for place, value in exact.items()
    }


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got.double() - expected.double()).abs().max().item()


def _train(training: Training, world_size: int, summation: Summation) -> _Run:
    """Run the whole schedule on one model, with the pieces of all ranks one after the other."""
    model = training.problem.build().to(summation.dtype)
    parameters = dict(model.named_parameters())
    initial = _copy(parameters)
    optimizer = training.optimizer(parameters.values())
    ranks = _RankBuffers(model, world_size)
    steps = []
    for step in range(training.schedule.steps):
        losses, contributions = _pieces(training, model, ranks, step, summation)
        _accumulate(parameters, contributions, summation, training.plan)
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}
        _update(training, optimizer, step)
        seen = OracleStep(
            losses=losses, contributions=contributions, gradients=gradients, parameters=_copy(parameters)
        )
        steps.append(seen)
    state = {
        f"{name}/{key}": value.clone()
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    }
    return _Run(initial=initial, steps=tuple(steps), optimizer_state=state, buffers=ranks.all())


class _RankBuffers:
    """Buffers of every rank, swapped in and out of the one model: forward changes those of its rank alone."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self._live = dict(model.named_buffers())
        self._of_rank = [_copy(self._live) for _ in range(world_size)]

    def enter(self, rank: int) -> None:
        """Make the model's buffers those of ``rank``."""
        for name, buffer in self._live.items():
            buffer.copy_(self._of_rank[rank][name])

    def leave(self, rank: int) -> None:
        """Keep the model's buffers as those of ``rank``."""
        self._of_rank[rank] = _copy(self._live)

    def all(self) -> tuple[Tensors, ...]:
        """Give each rank's buffers."""
        return tuple(self._of_rank)


def _pieces(
    training: Training, model: nn.Module, ranks: _RankBuffers, step: int, summation: Summation
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss and the gradients of every (microbatch, rank) of a step, each by itself."""
    world_size, num_microbatches = len(ranks.all()), training.schedule.microbatches
    weight = loss_weight(training, world_size, step)
    losses = torch.zeros(num_microbatches, world_size, dtype=summation.dtype)
    found: dict[str, torch.Tensor] = {}
    names, parameters = zip(*model.named_parameters(), strict=True)
    for microbatch in range(num_microbatches):
        for rank in range(world_size):
            batch = summation.prepare(training.problem.batch(step=step, microbatch=microbatch, rank=rank))
            ranks.enter(rank)
            loss = training.problem.loss_sum(model(*batch.inputs), batch) * weight
            ranks.leave(rank)
            losses[microbatch, rank] = loss.detach()
            for name, gradient in zip(
                names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    shape = (num_microbatches, world_size, *gradient.shape)
                    found.setdefault(name, gradient.new_zeros(shape))[microbatch, rank] = gradient
    return losses, found


def _accumulate(
    parameters: Mapping[str, nn.Parameter],
    contributions: Tensors,
    summation: Summation,
    plan: Plan,
) -> None:
    for name, pieces in contributions.items():
        # Cleared before, to None or to zeros; a parameter that no loss reaches keeps what clearing left.
        parameters[name].grad = summation.reduce(pieces, plan)


def _update(training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
    clears_to_none = training.schedule.zero_grad is ZeroGrad.SET_TO_NONE or step % 2 == 0
    if training.schedule.order is LoopOrder.ZERO_THEN_STEP:
        optimizer.zero_grad(set_to_none=clears_to_none)
        optimizer.step()
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=clears_to_none)


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}
