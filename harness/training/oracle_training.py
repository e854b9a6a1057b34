"""One training of the oracle: the whole schedule on one model, in one order of sums, with no communication."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import nn

from shardproof.harness.cases.training import LoopOrder, Training
from shardproof.harness.cases.user_model import StepSchedules
from shardproof.harness.torch_compat.dtypes import cast_module
from shardproof.harness.training.oracle_actor import Batches, OracleModels, StackedPieces, pieces_of_step
from shardproof.harness.training.oracle_observation import (
    INITIAL_STEP,
    LOSSES,
    NORM,
    OracleObservation,
    OracleStep,
    Quantity,
    Tensors,
)
from shardproof.harness.training.piece_sizes import sizes_of
from shardproof.harness.training.reduction_orders import Summation
from shardproof.harness.training.rounding import rounding_anew

__all__ = ["KeepTensors", "ShowTensors", "copied", "train"]

_T = TypeVar("_T", torch.Tensor, torch.Tensor | None)


class KeepTensors(Protocol):
    """Keeps tensors that will change, in memory or elsewhere."""

    def __call__(self, tensors: Mapping[str, _T], /) -> Mapping[str, _T]:
        """Return them as they are now."""


class ShowTensors(Protocol):
    """Takes what a training makes, in that order; ``quantity`` is None for what only explains a failure."""

    def __call__(
        self, quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0, /
    ) -> Mapping[str, _T]:
        """Return what is kept of it."""


def train(
    training: Training,
    world_size: int,
    summation: Summation,
    show: ShowTensors,
    batches: Batches | None = None,
    drawing: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it holds nothing
) -> OracleObservation:
    """Run the whole schedule on one model, with the pieces of all ranks one after the other.

    What ``show`` returns of each tensor is what the observation has, which knows no noise.
    """
    model = cast_module(training.problem.build(), summation.dtype)
    parameters = dict(model.named_parameters())
    initial, built = show(Quantity.INITIAL, INITIAL_STEP, parameters), copied(dict(model.named_buffers()))
    schedules = StepSchedules(training.optimizer)
    optimizer = schedules.factory(parameters.values())
    workshop = OracleModels(model, world_size, summation, batches)
    steps, last = [], training.schedule.steps - 1
    state_before: Tensors = {}
    is_disturbed = summation.seed is not None and not training.problem.is_widened
    disturbing = rounding_anew(summation.seed or 0) if is_disturbed else nullcontext()
    for step in range(training.schedule.steps):
        with drawing, disturbing:
            losses, contributions = pieces_of_step(training, workshop, step)
        show(Quantity.LOSS, step, {LOSSES: losses})
        is_skipped = training.schedule.is_skipped(step)
        if is_skipped:
            for name in contributions:  # what is there will be cleared, perhaps to zeros
                parameters[name].grad = torch.zeros_like(parameters[name])
            contributions = {}
        for name, pieces in contributions.items():
            # Cleared before, to None or to zeros, unless the optimizer was not given the parameter.
            reduced, left = summation.reduce(pieces, training.plan), parameters[name].grad
            parameters[name].grad = reduced if left is None else left + reduced
        is_reference = summation.seed is None
        sizes = {name: sizes_of(pieces) for name, pieces in contributions.items()} if is_reference else {}
        kept_pieces = show(None, step, StackedPieces(contributions))
        contributions.clear()  # the most that is in memory
        norm = None if is_skipped else _clip(training, parameters)
        found = {} if is_skipped else {name: parameter.grad for name, parameter in parameters.items()}
        gradients = show(Quantity.GRADIENT, step, found)
        show(Quantity.NORM, step, {} if norm is None else {NORM: norm})
        if step == last:
            state_before = show(None, step, _state(optimizer, parameters))
        if training.plan.clip_in_step is not None and not is_skipped:
            nn.utils.clip_grad_norm_(parameters.values(), training.plan.clip_in_step)
        with disturbing:
            _update(training, optimizer, step)
        schedules.step()
        seen = OracleStep(
            losses=losses,
            contributions=kept_pieces,
            gradients=gradients,
            parameters=show(Quantity.PARAMETER, step, parameters),
            sizes=sizes,
            norm=norm,
        )
        steps.append(seen)
    of_ranks = workshop.buffers()
    return OracleObservation(
        world_size=world_size,
        plan=training.plan,
        initial=initial,
        steps=tuple(steps),
        optimizer_state=show(Quantity.OPTIMIZER_STATE, last, _state(optimizer, parameters)),
        buffers=tuple(show(Quantity.BUFFER, last, buffers, rank) for rank, buffers in enumerate(of_ranks)),
        noise={},
        scales={},
        constants=frozenset(
            name
            for name in built.keys() & of_ranks[0].keys()
            if all(torch.equal(buffers[name], built[name]) for buffers in of_ranks)
        ),
        dtypes={},
        is_exact=False,
        draws=workshop.draws,
        is_widened=training.problem.is_widened,
        untrained=_not_given(optimizer, parameters),
        state_before=state_before,
    )


def _clip(training: Training, parameters: Mapping[str, nn.Parameter]) -> torch.Tensor | None:
    clip = training.schedule.clip
    if clip is None:
        return None
    return nn.utils.clip_grad_norm_(parameters.values(), clip.max_norm, clip.norm_type).detach()


def _update(training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
    clears_to_none = training.schedule.clears_to_none(step)
    if training.schedule.is_skipped(step):
        optimizer.zero_grad(set_to_none=clears_to_none)
    elif training.schedule.order is LoopOrder.ZERO_THEN_STEP:
        optimizer.zero_grad(set_to_none=clears_to_none)
        optimizer.step()
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=clears_to_none)


def _not_given(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) not in given)


def _state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Tensors:
    return {
        f"{name}/{key}": value
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    }


def copied(tensors: Mapping[str, _T], /) -> dict[str, _T]:
    """Copy tensors in memory."""
    return {name: None if t is None else t.detach().clone() for name, t in tensors.items()}
