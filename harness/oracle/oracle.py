"""The oracle: the same training on one process, without communication, in float64, with its float32 noise.

It depends on no engine and compares nothing; ``harness.laws.parity`` compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from shardproof.harness.cases.draws import drawing_in
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import UserModel, is_communicating, is_stepping, written_by_forward
from shardproof.harness.oracle.absolute_error import largest_deviation
from shardproof.harness.oracle.oracle_actor import Batches, OracleModels, parameters_apart, pieces_of_step
from shardproof.harness.oracle.oracle_noise import noise_device, noise_of, scales_of
from shardproof.harness.oracle.oracle_observation import (
    FirstStep,
    OracleObservation,
    OracleStep,
    Quantity,
    TensorKey,
    Tensors,
)
from shardproof.harness.oracle.oracle_training import KeepTensors, clip, copied, dense_tensors, train
from shardproof.harness.oracle.reduction_orders import (
    EXACT_ORDER,
    is_of_full_precision,
    num_reorderings,
    reduces_fully,
    reference_order,
    reordering,
)
from shardproof.harness.oracle.still_elements import still_elements
from shardproof.harness.torch_compat.dispatch import drawing_apart
from shardproof.harness.torch_compat.dtypes import cast_module, widened

_T = TypeVar("_T", torch.Tensor, torch.Tensor | None)

# Noise of this many roundings, relative to the summands, is not float32 noise: reordered sums cause a few roundings.
_COARSE_ROUNDINGS = 256


def run_oracle(
    training: Training,
    world_size: int,
    keep: KeepTensors | None = None,
    *,
    explains: bool = True,
    device: str = "cpu",
) -> OracleObservation:
    """Train once in float64 and a few times in the parameters' dtype with other orders of summation.

    If float64 cannot be the reference, train once in the parameters' dtypes, and perturb the other runs; see [Note:
    rounded anew]. ``world_size`` counts the ranks with data of their own. Never communicates. ``keep`` copies tensors,
    into memory if it is None. Unless ``explains``, omits results that only explain a failure. What is measured of
    rounding is measured on ``device``, the kind on which the ranks compute; the reference is computed on the CPU.
    """
    keep = keep or copied
    batches = Batches(training.problem)
    with drawing_apart():
        exact = _exact(training, world_size, keep, batches, explains)
        exact = replace(
            exact, still=still_elements(training, _in_float64(training, world_size, exact, batches))
        )
        there = noise_device(training.problem, device)
        found = noise_of(training, world_size, exact, batches, there)
        noise = found.noise
        has_pieces = not is_stepping(training.problem)  # otherwise a step is whole
        is_coarse = has_pieces and _rounds_coarsely(training, exact, noise)
        first = _first_step(training, world_size, there) if is_coarse else None
        has_lagging = explains and has_pieces
        steps = _with_lagging(training, exact, keep, batches) if has_lagging else exact.steps
    is_power_of_two = world_size & (world_size - 1) == 0
    quiet = {p.name for p, deviates_by in noise.items() if p.quantity is Quantity.BUFFER and not deviates_by}
    return replace(
        exact,
        steps=steps,
        noise=noise,
        scales=scales_of(exact),
        constants=exact.constants & quiet,
        still_noise=found.still_noise,
        dtypes=found.dtypes,
        is_exact=training.problem.is_exact and is_power_of_two and not any(noise.values()),
        first=first,
        explains=explains,
    )


def _rounds_coarsely(training: Training, exact: OracleObservation, noise: Mapping[TensorKey, float]) -> bool:
    """Whether the first gradients round far more than their reduction does, as the plan requests or as measured."""
    plan, schedule = training.plan, training.schedule
    if not exact.steps or plan.clip_in_step is not None or training.origin is not None:
        return False
    if plan.compute_dtype is not None and schedule.microbatches == 1:
        return reduces_fully(plan, training.convert) and schedule.clip is None
    if not is_of_full_precision(plan, training.convert):
        return False
    coarse = _COARSE_ROUNDINGS * torch.finfo(torch.float32).eps
    return any(
        noise[TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)]
        > coarse * sizes.absolute * exact.clipping_factor(0, name)
        for name, sizes in exact.steps[0].sizes.items()
    )


def _first_step(training: Training, world_size: int, device: str) -> FirstStep:
    dtype = training.convert
    model = cast_module(training.problem.build(), dtype).to(device)
    in_order = replace(reordering(0, training.plan, dtype), seed=None, device=device)
    models = OracleModels(training.problem, model, world_size, in_order)
    _, found = pieces_of_step(training, models, step=0)
    contributions = {
        name: [[piece.cpu() for piece in of_ranks] for of_ranks in rows] for name, rows in found.items()
    }
    exact = _clipped(
        training,
        {
            n: EXACT_ORDER.reduce([[*map(widened, of_ranks)] for of_ranks in pieces], training.plan)
            for n, pieces in contributions.items()
        },
    )
    orders = [reordering(k, training.plan, dtype) for k in range(num_reorderings(training.plan))]
    reduced = [
        _clipped(training, {n: order.reduce(pieces, training.plan) for n, pieces in contributions.items()})
        for order in orders
    ]
    shown = dense_tensors(exact)
    return FirstStep(
        gradients=shown,
        parameters=_stepped(training, exact),
        noise=_noise(shown, [*map(dense_tensors, reduced)]),
    )


def _clipped(training: Training, gradients: Tensors) -> Tensors:
    """Return gradients as the schedule clips them."""
    if training.schedule.clip is None:
        return gradients
    holders = {name: nn.Parameter(torch.empty_like(gradient)) for name, gradient in gradients.items()}
    for name, holder in holders.items():
        holder.grad = gradients[name]
    clip(training, holders)
    return {name: holder.grad for name, holder in holders.items() if holder.grad is not None}


def _stepped(training: Training, gradients: Tensors) -> Tensors:
    """Return the parameters after a first update by these gradients, in the dtype of exact ones."""
    model = cast_module(training.problem.build(), EXACT_ORDER.dtype)
    for name, gradient in gradients.items():
        model.get_parameter(name).grad = gradient
    training.optimizer(model.parameters()).step()
    return copied(dict(model.named_parameters()))


def _noise(exact: Tensors, runs: Sequence[Tensors]) -> dict[str, float]:
    return {name: max(largest_deviation(run[name], value) for run in runs) for name, value in exact.items()}


def _with_lagging(
    training: Training, exact: OracleObservation, keep: KeepTensors, batches: Batches
) -> tuple[OracleStep, ...]:
    """Add each step's gradients as they would be if forward used the parameters of the previous step.

    Numbers drawn in float32 are not repeated, and buffers follow these forwards: the result only names a defect.
    """
    order = reference_order(training.problem.is_widened, training.convert)
    model = cast_module(training.problem.build(), order.dtype)
    models = OracleModels(training.problem, model, exact.world_size, order, batches)
    parameters, met = parameters_apart(model, written_by_forward(training.problem)), exact.initial
    steps = [*exact.steps[:1]]
    for step, seen in enumerate(exact.steps[1:], start=1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(met[name])
        losses, contributions = pieces_of_step(training, models, step)
        reduced = {n: order.reduce(pieces, training.plan) for n, pieces in contributions.items()}
        steps.append(replace(seen, lagging=keep(dense_tensors(reduced)), lagging_losses=losses))
        met = exact.steps[step - 1].parameters
    return tuple(steps)


def _in_float64(
    training: Training, world_size: int, exact: OracleObservation, batches: Batches
) -> OracleObservation:
    """Return the gradients of a model of few bits in float64, which shows what is zero; otherwise the reference."""
    problem = training.problem
    if not (isinstance(problem, UserModel) and problem.is_narrow and not problem.is_widened):
        return exact
    if is_stepping(problem) or is_communicating(problem):
        return exact

    def show(
        quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0
    ) -> Mapping[str, _T]:
        return copied(tensors) if quantity in {Quantity.INITIAL, Quantity.GRADIENT} else {}

    wide = replace(training, problem=replace(problem, is_widened=True))
    try:
        return train(wide, world_size, EXACT_ORDER, show, batches)
    except Exception:  # of the user's code, which may cast to few bits by itself
        return exact


def _exact(
    training: Training, world_size: int, keep: KeepTensors, batches: Batches, explains: bool
) -> OracleObservation:
    """Train in float64; if random numbers are drawn, again with the numbers that float32 would draw."""

    def show(
        quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0
    ) -> Mapping[str, _T]:
        return {} if quantity is None and not explains else keep(tensors)

    exact = train(
        training, world_size, reference_order(training.problem.is_widened, training.convert), show, batches
    )
    if not exact.draws or not training.problem.is_widened:
        return exact
    dtype = training.plan.compute_dtype or training.convert or torch.float32
    return train(training, world_size, EXACT_ORDER, show, batches, partial(drawing_in, dtype))
