"""The oracle: the same training on one process with no communication, in float64, with its float32 noise.

It knows nothing of engines and compares nothing; ``harness.laws.parity`` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import nn

from shardproof.engine.contract import Plan
from shardproof.harness.cases.training import LoopOrder, Training
from shardproof.harness.cases.user_model import StepSchedules
from shardproof.harness.torch_compat.dispatch import drawing_apart
from shardproof.harness.torch_compat.dtypes import cast_module, widened
from shardproof.harness.training.absolute_error import deviation, largest
from shardproof.harness.training.draws import drawing_in
from shardproof.harness.training.oracle_actor import OracleActor, OracleModels
from shardproof.harness.training.reduction_orders import (
    EXACT_ORDER,
    OWN_ORDER,
    Summation,
    is_of_full_precision,
    num_reorderings,
    reduces_fully,
    reordering,
)
from shardproof.harness.training.rounding import rounding_anew

__all__ = [
    "INITIAL_STEP",
    "LOSSES",
    "NORM",
    "FirstStep",
    "OracleObservation",
    "OracleStep",
    "Quantity",
    "TensorKey",
    "run_oracle",
]

Tensors = Mapping[str, torch.Tensor]

INITIAL_STEP = -1  # the step of what is seen before the first step
LOSSES = "loss"  # the name under which a step's losses are one tensor [losses of the script, ranks with data]
# Noise of that many roundings, over what is added, is not that of float32: re-ordered sums make a few.
_COARSE_ROUNDINGS = 256
NORM = "norm"  # the name under which the norm that clipping returns is a scalar tensor


class Quantity(StrEnum):
    """What is compared; within a step in this order."""

    INITIAL = "initial parameter"
    LOSS = "loss"
    GRADIENT = "gradient"
    NORM = "gradient norm"
    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKey:
    """One tensor of a training: what it is, after which step, and its name."""

    quantity: Quantity
    step: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OracleStep:
    """One optimizer step of the oracle.

    ``losses`` is [losses of the script, ranks with data]. ``contributions[name][m, r]`` is the gradient of rank
    r's loss of microbatch m as that rank computes it, before any averaging: summed over both and divided by
    the plan's divisor they are the step's gradient. ``gradients`` is what the optimizer finds, clipped if so
    asked, None where there is none. ``norm`` is that of all gradients before clipping. ``lagging`` are the gradients,
    unclipped, of this step's data with the parameters of the step before, and ``lagging_losses`` its losses: empty and
    None for the first step.
    """

    losses: torch.Tensor
    contributions: Tensors
    gradients: Mapping[str, torch.Tensor | None]
    parameters: Tensors
    norm: torch.Tensor | None = None
    lagging: Tensors = field(default_factory=dict)
    lagging_losses: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstStep:
    """The first step from pieces of the ranks' own dtype, rows in their order: rounded as the model rounds.

    Pieces are added exactly; ``noise`` is how far gradients deviate where they are added in other orders, and
    ``parameter_noise`` how far parameters do.
    """

    gradients: Tensors
    parameters: Tensors
    noise: Mapping[str, float]
    parameter_noise: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OracleObservation:
    """What a right engine computes, in float64 or in the model's own dtypes, and how far float32 may stray from it.

    ``buffers`` has one entry per rank: those after all of that rank's forwards. ``noise`` is, per tensor, the
    largest absolute deviation from the float64 value over float32 runs whose sums are taken in other orders.
    ``constants`` are the buffers that training left as they were built, bit by bit, on all ranks in all runs.
    ``dtypes`` are those of the float32 runs, with ``INITIAL_STEP`` for every place. ``is_exact`` says that the
    problem claims to be exact, the world is a power of two, and no float32 run deviated in a single bit. ``draws``
    says that forward or the loss draws random numbers; ``device`` is that of the ranks to compare with. ``untrained``
    are the parameters that the optimizer was not given. ``state_before`` is the optimizer state before the last step.
    ``first`` is None unless the model rounds far more than its dtype does; see [Note: rounding of one side].
    """

    world_size: int
    plan: Plan
    initial: Tensors
    steps: tuple[OracleStep, ...]
    optimizer_state: Tensors
    buffers: tuple[Tensors, ...]
    noise: Mapping[TensorKey, float]
    constants: frozenset[str]
    dtypes: Mapping[TensorKey, torch.dtype]
    is_exact: bool
    draws: bool = False
    device: str = "cpu"
    first: FirstStep | None = None
    is_widened: bool = True
    untrained: frozenset[str] = frozenset()
    state_before: Tensors = field(default_factory=dict)

    @property
    def divisor(self) -> float:
        """What sums of gradients over ranks are divided by."""
        return self.plan.divisor(self.world_size)

    def reference(self, quantity: Quantity, step: int, rank: int) -> Mapping[str, torch.Tensor | None]:
        """Return the full tensors of one quantity after ``step``; ``rank`` matters for buffers alone."""
        match quantity:
            case Quantity.INITIAL:
                return self.initial
            case Quantity.LOSS:
                return {LOSSES: self.steps[step].losses}
            case Quantity.GRADIENT:
                return self.steps[step].gradients
            case Quantity.NORM:
                norm = self.steps[step].norm
                return {} if norm is None else {NORM: norm}
            case Quantity.PARAMETER:
                return self.steps[step].parameters
            case Quantity.OPTIMIZER_STATE:
                return self.optimizer_state
            case Quantity.BUFFER:
                return self.buffers[rank]

    def dtype(self, quantity: Quantity, name: str) -> torch.dtype:
        """Return the dtype that an engine's tensor must have."""
        return self.dtypes[TensorKey(quantity=quantity, step=INITIAL_STEP, name=name)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """One training in one dtype and order of summation."""

    initial: Tensors
    steps: tuple[OracleStep, ...]
    optimizer_state: Tensors
    buffers: tuple[Tensors, ...]
    built_buffers: Tensors
    draws: bool
    untrained: frozenset[str]
    state_before: Tensors

    def tensors(self) -> dict[TensorKey, torch.Tensor]:
        """List every tensor; buffers of all ranks are one tensor, since their noise is judged together."""
        last = len(self.steps) - 1
        places = [(Quantity.INITIAL, INITIAL_STEP, name, t) for name, t in self.initial.items()]
        for step, seen in enumerate(self.steps):
            places.append((Quantity.LOSS, step, LOSSES, seen.losses))
            places += [(Quantity.GRADIENT, step, n, t) for n, t in seen.gradients.items() if t is not None]
            places += [(Quantity.NORM, step, NORM, seen.norm)] if seen.norm is not None else []
            places += [(Quantity.PARAMETER, step, n, t) for n, t in seen.parameters.items()]
        places += [(Quantity.OPTIMIZER_STATE, last, n, t) for n, t in self.optimizer_state.items()]
        for name in self.buffers[0]:
            together = torch.stack([of_rank[name] for of_rank in self.buffers])
            places.append((Quantity.BUFFER, last, name, together))
        return {TensorKey(quantity=q, step=s, name=n): t for q, s, n, t in places}


def run_oracle(training: Training, world_size: int) -> OracleObservation:
    """Train once in float64 and a few times in the parameters' dtype with other orders of summation.

    Where float64 is no reference, train once in the parameters' dtypes, and disturb the other runs; see
    [Note: rounded anew]. ``world_size`` counts the ranks that have data of their own. Never communicates.
    """
    with drawing_apart():
        exact = _exact(training, world_size)
        noise, dtypes = _noise_of(training, world_size, exact)
        first = _first_step(training, world_size) if _rounds_coarsely(training, exact, noise) else None
        steps = _with_lagging(training, world_size, exact)
    is_power_of_two = world_size & (world_size - 1) == 0
    return OracleObservation(
        world_size=world_size,
        plan=training.plan,
        initial=exact.initial,
        steps=steps,
        optimizer_state=exact.optimizer_state,
        buffers=exact.buffers,
        noise=noise,
        constants=_constants(exact, noise),
        dtypes=dtypes,
        is_exact=training.problem.is_exact and is_power_of_two and not any(noise.values()),
        draws=exact.draws,
        first=first,
        is_widened=training.problem.is_widened,
        untrained=exact.untrained,
        state_before=exact.state_before,
    )


def _rounds_coarsely(training: Training, exact: _Run, noise: Mapping[TensorKey, float]) -> bool:
    """Whether the first gradients round far more than their reduction does: by the model's word, or as asked."""
    plan, schedule = training.plan, training.schedule
    if not exact.steps or schedule.clip:
        return False
    if plan.compute_dtype is not None and schedule.microbatches == 1:
        return reduces_fully(plan, training.convert)
    if not is_of_full_precision(plan, training.convert):
        return False
    coarse = _COARSE_ROUNDINGS * torch.finfo(torch.float32).eps
    return any(
        noise[TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)]
        > coarse * largest(pieces.abs().sum((0, 1)))
        for name, pieces in exact.steps[0].contributions.items()
    )


def _first_step(training: Training, world_size: int) -> FirstStep:
    dtype = training.convert
    model = cast_module(training.problem.build(), dtype)
    in_order = replace(reordering(0, training.plan, dtype), seed=None)
    _, contributions = _pieces(training, OracleModels(model, world_size, in_order), step=0)
    orders = [reordering(k, training.plan, dtype) for k in range(num_reorderings(training.plan))]
    exact = {n: EXACT_ORDER.reduce(widened(pieces), training.plan) for n, pieces in contributions.items()}
    reduced = [
        {n: order.reduce(pieces, training.plan) for n, pieces in contributions.items()} for order in orders
    ]
    parameters = _stepped(training, EXACT_ORDER.dtype, exact)
    return FirstStep(
        gradients=exact,
        parameters=parameters,
        noise=_noise(exact, reduced),
        parameter_noise=_noise(parameters, [_stepped(training, dtype, gradients) for gradients in reduced]),
    )


def _stepped(training: Training, dtype: torch.dtype | None, gradients: Tensors) -> Tensors:
    """Return the parameters after a first update by these gradients."""
    model = cast_module(training.problem.build(), dtype)
    for name, gradient in gradients.items():
        model.get_parameter(name).grad = gradient
    training.optimizer(model.parameters()).step()
    return _copy(dict(model.named_parameters()))


def _noise(exact: Tensors, runs: Sequence[Tensors]) -> dict[str, float]:
    return {name: max(largest(deviation(run[name], value)) for run in runs) for name, value in exact.items()}


def _with_lagging(training: Training, world_size: int, exact: _Run) -> tuple[OracleStep, ...]:
    """Add what each step's gradients are where forward meets the parameters that the last update found.

    No random numbers of float32 are drawn and buffers follow these forwards: this names a defect, and decides nothing.
    """
    order = _reference_order(training)
    model = cast_module(training.problem.build(), order.dtype)
    workshop = OracleModels(model, world_size, order)
    parameters, met = dict(model.named_parameters()), exact.initial
    steps = [*exact.steps[:1]]
    for step, seen in enumerate(exact.steps[1:], start=1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(met[name])
        losses, contributions = _pieces(training, workshop, step)
        reduced = {n: order.reduce(pieces, training.plan) for n, pieces in contributions.items()}
        steps.append(replace(seen, lagging=reduced, lagging_losses=losses))
        met = exact.steps[step - 1].parameters
    return tuple(steps)


def _exact(training: Training, world_size: int) -> _Run:
    """Train in float64; where random numbers are drawn once more, with those that float32 would draw."""
    exact = _train(training, world_size, _reference_order(training))
    if not exact.draws or not training.problem.is_widened:
        return exact
    dtype = training.plan.compute_dtype or training.convert or torch.float32
    return _train(training, world_size, EXACT_ORDER, drawing_in(dtype))


def _reference_order(training: Training) -> Summation:
    return EXACT_ORDER if training.problem.is_widened else replace(OWN_ORDER, dtype=training.convert)


def _reordering(number: int, training: Training, draws: bool) -> Summation:
    """Return an order of sums; of a model that draws, rows stay with the numbers that were drawn for them."""
    order = reordering(number, training.plan, training.convert)
    return replace(order, keeps_rows=draws)


def _noise_of(
    training: Training, world_size: int, exact: _Run
) -> tuple[dict[TensorKey, float], dict[TensorKey, torch.dtype]]:
    """Return how far each tensor of the other orders deviates, and its dtype; one run is in memory at a time."""
    reference = exact.tensors()
    noise, dtypes = dict.fromkeys(reference, 0.0), dict[TensorKey, torch.dtype]()
    for number in range(num_reorderings(training.plan)):
        order = _reordering(number, training, exact.draws)
        run = _train(training, world_size, order, keeps_pieces=False).tensors()
        for place, value in reference.items():
            if value.numel():
                noise[place] = _worse(noise[place], deviation(run[place], value).max().item())
        for place, tensor in run.items():
            dtypes[replace(place, step=INITIAL_STEP)] = tensor.dtype
    return noise, dtypes


def _worse(one: float, other: float) -> float:
    """Return the larger, or the one that is no number."""
    return one if one >= other or math.isnan(one) else other


def _constants(exact: _Run, noise: Mapping[TensorKey, float]) -> frozenset[str]:
    """Name the buffers that are what they were, and that no other run deviates from."""
    quiet = {p.name for p, deviates_by in noise.items() if p.quantity is Quantity.BUFFER and not deviates_by}
    built = exact.built_buffers
    return frozenset(
        name
        for name in quiet & built.keys()
        if all(torch.equal(of_rank[name], built[name]) for of_rank in exact.buffers)
    )


def _train(
    training: Training,
    world_size: int,
    summation: Summation,
    drawing: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it holds nothing
    *,
    keeps_pieces: bool = True,
) -> _Run:
    """Run the whole schedule on one model, with the pieces of all ranks one after the other.

    Without ``keeps_pieces`` steps have no contributions, which take the most memory.
    """
    model = cast_module(training.problem.build(), summation.dtype)
    parameters = dict(model.named_parameters())
    initial, built_buffers = _copy(parameters), _copy(dict(model.named_buffers()))
    schedules = StepSchedules(training.optimizer)
    optimizer = schedules.factory(parameters.values())
    workshop = OracleModels(model, world_size, summation)
    steps = []
    state_before: Tensors = {}
    is_disturbed = summation.seed is not None and not training.problem.is_widened
    disturbing = rounding_anew(summation.seed or 0) if is_disturbed else nullcontext()
    for step in range(training.schedule.steps):
        with drawing, disturbing:
            losses, contributions = _pieces(training, workshop, step)
        is_skipped = training.schedule.is_skipped(step)
        if is_skipped:
            contributions = {}
        for name, pieces in contributions.items():
            # Cleared before, to None or to zeros, unless the optimizer was not given the parameter.
            reduced, left = summation.reduce(pieces, training.plan), parameters[name].grad
            parameters[name].grad = reduced if left is None else left + reduced
        norm = None if is_skipped else _clip(training, parameters)
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}
        state_before = _state(optimizer, parameters) if step == training.schedule.steps - 1 else {}
        with disturbing:
            _update(training, optimizer, step)
        schedules.step()
        seen = OracleStep(
            losses=losses,
            contributions=contributions if keeps_pieces else {},
            gradients={} if is_skipped else gradients,
            parameters=_copy(parameters),
            norm=norm,
        )
        steps.append(seen)
    return _Run(
        initial=initial,
        steps=tuple(steps),
        optimizer_state=_state(optimizer, parameters),
        buffers=workshop.buffers(),
        built_buffers=built_buffers,
        draws=workshop.draws,
        untrained=_not_given(optimizer, parameters),
        state_before=state_before,
    )


def _pieces(
    training: Training, workshop: OracleModels, step: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Play the script of a step for each rank by itself; give losses, and gradients of each (microbatch, rank)."""
    num_microbatches, world_size = training.schedule.microbatches, workshop.world_size
    losses = []
    found: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        actor = OracleActor(workshop, training, step, rank)
        with workshop.playing(rank):
            training.script.play(actor)
        losses.append(torch.tensor(actor.losses, dtype=torch.float64))
        for (microbatch, name), gradient in actor.gradients.items():
            shape = (num_microbatches, world_size, *gradient.shape)
            found.setdefault(name, gradient.new_zeros(shape))[microbatch, rank] = gradient
    return torch.stack(losses, dim=1), found


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
        f"{name}/{key}": value.clone()
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}
