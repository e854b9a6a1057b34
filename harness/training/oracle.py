"""The oracle: the same training on one process with no communication, in float64, with its float32 noise.

It knows nothing of engines and compares nothing; ``harness.laws.parity`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeVar

import torch
from torch import nn

from shardproof.engine.contract import Plan
from shardproof.harness.cases.batch import ModelBatch
from shardproof.harness.cases.training import LoopOrder, Training
from shardproof.harness.cases.user_model import StepSchedules
from shardproof.harness.torch_compat.dispatch import drawing_apart
from shardproof.harness.torch_compat.dtypes import cast_module, widened
from shardproof.harness.training.absolute_error import largest, largest_deviation
from shardproof.harness.training.draws import drawing_in
from shardproof.harness.training.oracle_actor import Batches, OracleModels, StackedPieces, pieces_of_step
from shardproof.harness.training.piece_sizes import PieceSizes, sizes_of
from shardproof.harness.training.reduction_orders import (
    EXACT_ORDER,
    OWN_ORDER,
    Summation,
    distinct,
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
_T = TypeVar("_T", torch.Tensor, torch.Tensor | None)

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
    the plan's divisor they are the step's gradient. ``sizes`` says how large they are. ``gradients`` is what the
    optimizer finds, clipped if so asked, None where there is none. ``norm`` is that of all gradients before clipping.
    ``lagging`` are the gradients, unclipped, of this step's data with the parameters of the step before, and
    ``lagging_losses`` its losses: empty and None for the first step. Contributions and what lags only explain a
    failure; see `OracleObservation.explains`.
    """

    losses: torch.Tensor
    contributions: Tensors
    gradients: Mapping[str, torch.Tensor | None]
    parameters: Tensors
    sizes: Mapping[str, PieceSizes] = field(default_factory=dict)
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
    largest absolute deviation from the float64 value over float32 runs whose sums are taken in other orders, and
    ``scales`` is the largest value rounded on the way: the result itself may have cancelled to nearly zero.
    ``constants`` are the buffers that training left as they were built, bit by bit, on all ranks in all runs.
    ``dtypes`` are those of the float32 runs, with ``INITIAL_STEP`` for every place. ``is_exact`` says that the
    problem claims to be exact, the world is a power of two, and no float32 run deviated in a single bit. ``draws``
    says that forward or the loss draws random numbers; ``device`` is that of the ranks to compare with. ``untrained``
    are the parameters that the optimizer was not given. ``state_before`` is the optimizer state before the last step.
    ``first`` is None unless the model rounds far more than its dtype does; see [Note: rounding of one side].
    ``explains`` says that what only explains a failure is there: contributions, what lags, and ``state_before``.
    """

    world_size: int
    plan: Plan
    initial: Tensors
    steps: tuple[OracleStep, ...]
    optimizer_state: Tensors
    buffers: tuple[Tensors, ...]
    noise: Mapping[TensorKey, float]
    scales: Mapping[TensorKey, float]
    constants: frozenset[str]
    dtypes: Mapping[TensorKey, torch.dtype]
    is_exact: bool
    draws: bool = False
    device: str = "cpu"
    first: FirstStep | None = None
    is_widened: bool = True
    untrained: frozenset[str] = frozenset()
    state_before: Tensors = field(default_factory=dict)
    explains: bool = True

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

    def clipping_factor(self, step: int, name: str) -> float:
        """Return the factor by which clipping made a gradient, and all that was rounded before, smaller."""
        at = self.steps[step]
        gradient = at.gradients[name]
        if at.norm is None or gradient is None:
            return 1.0
        whole = at.sizes[name].total / self.divisor
        return largest(gradient) / whole if whole else 1.0

    def dtype(self, quantity: Quantity, name: str) -> torch.dtype:
        """Return the dtype that an engine's tensor must have."""
        return self.dtypes[TensorKey(quantity=quantity, step=INITIAL_STEP, name=name)]


class KeepTensors(Protocol):
    """Keeps tensors that will change, in memory or elsewhere."""

    def __call__(self, tensors: Mapping[str, _T], /) -> Mapping[str, _T]:
        """Return them as they are now."""


class _Show(Protocol):
    """Takes what a training makes, in that order; ``quantity`` is None for what only explains a failure."""

    def __call__(
        self, quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0, /
    ) -> Mapping[str, _T]:
        """Return what is kept of it."""


def run_oracle(
    training: Training, world_size: int, keep: KeepTensors | None = None, *, explains: bool = True
) -> OracleObservation:
    """Train once in float64 and a few times in the parameters' dtype with other orders of summation.

    Where float64 is no reference, train once in the parameters' dtypes, and disturb the other runs; see
    [Note: rounded anew]. ``world_size`` counts the ranks that have data of their own. Never communicates.
    ``keep`` copies tensors, in memory if it is None. What only explains a failure is left out unless ``explains``.
    """
    keep = keep or _copy
    batches = Batches(training.problem)
    with drawing_apart():
        exact = _exact(training, world_size, keep, batches, explains)
        noise, dtypes = _noise_of(training, world_size, exact, batches)
        first = _first_step(training, world_size) if _rounds_coarsely(training, exact, noise) else None
        steps = _with_lagging(training, exact, keep, batches) if explains else exact.steps
    is_power_of_two = world_size & (world_size - 1) == 0
    quiet = {p.name for p, deviates_by in noise.items() if p.quantity is Quantity.BUFFER and not deviates_by}
    return replace(
        exact,
        steps=steps,
        noise=noise,
        scales=_scales(exact),
        constants=exact.constants & quiet,
        dtypes=dtypes,
        is_exact=training.problem.is_exact and is_power_of_two and not any(noise.values()),
        first=first,
        explains=explains,
    )


def _rounds_coarsely(training: Training, exact: OracleObservation, noise: Mapping[TensorKey, float]) -> bool:
    """Whether the first gradients round far more than their reduction does: by the model's word, or as asked."""
    plan, schedule = training.plan, training.schedule
    if not exact.steps or schedule.clip or plan.clip_in_step is not None:
        return False
    if plan.compute_dtype is not None and schedule.microbatches == 1:
        return reduces_fully(plan, training.convert)
    if not is_of_full_precision(plan, training.convert):
        return False
    coarse = _COARSE_ROUNDINGS * torch.finfo(torch.float32).eps
    return any(
        noise[TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)] > coarse * sizes.absolute
        for name, sizes in exact.steps[0].sizes.items()
    )


def _first_step(training: Training, world_size: int) -> FirstStep:
    dtype = training.convert
    model = cast_module(training.problem.build(), dtype)
    in_order = replace(reordering(0, training.plan, dtype), seed=None)
    _, contributions = pieces_of_step(training, OracleModels(model, world_size, in_order), step=0)
    orders = [reordering(k, training.plan, dtype) for k in range(num_reorderings(training.plan))]
    exact = {
        n: EXACT_ORDER.reduce([[*map(widened, of_ranks)] for of_ranks in pieces], training.plan)
        for n, pieces in contributions.items()
    }
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
    return {name: max(largest_deviation(run[name], value) for run in runs) for name, value in exact.items()}


def _with_lagging(
    training: Training, exact: OracleObservation, keep: KeepTensors, batches: Batches
) -> tuple[OracleStep, ...]:
    """Add what each step's gradients are where forward meets the parameters that the last update found.

    No random numbers of float32 are drawn and buffers follow these forwards: this names a defect, and decides nothing.
    """
    order = _reference_order(training)
    model = cast_module(training.problem.build(), order.dtype)
    workshop = OracleModels(model, exact.world_size, order, batches)
    parameters, met = dict(model.named_parameters()), exact.initial
    steps = [*exact.steps[:1]]
    for step, seen in enumerate(exact.steps[1:], start=1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(met[name])
        losses, contributions = pieces_of_step(training, workshop, step)
        reduced = {n: order.reduce(pieces, training.plan) for n, pieces in contributions.items()}
        steps.append(replace(seen, lagging=keep(reduced), lagging_losses=losses))
        met = exact.steps[step - 1].parameters
    return tuple(steps)


def _exact(
    training: Training, world_size: int, keep: KeepTensors, batches: Batches, explains: bool
) -> OracleObservation:
    """Train in float64; where random numbers are drawn once more, with those that float32 would draw."""

    def show(
        quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0
    ) -> Mapping[str, _T]:
        return {} if quantity is None and not explains else keep(tensors)

    exact = _train(training, world_size, _reference_order(training), show, batches)
    if not exact.draws or not training.problem.is_widened:
        return exact
    dtype = training.plan.compute_dtype or training.convert or torch.float32
    return _train(training, world_size, EXACT_ORDER, show, batches, drawing_in(dtype))


def _reference_order(training: Training) -> Summation:
    return EXACT_ORDER if training.problem.is_widened else replace(OWN_ORDER, dtype=training.convert)


def _reorderings(training: Training, exact: OracleObservation, batches: Batches) -> list[Summation]:
    """Return the orders of sums that differ; of a model that draws, rows stay with the numbers drawn for them."""
    plan, draws = training.plan, exact.draws
    numbers = range(num_reorderings(plan))
    orders = [replace(reordering(n, plan, training.convert), keeps_rows=draws) for n in numbers]
    keep_rows = draws or isinstance(batches.batch(step=0, microbatch=0, rank=0), ModelBatch)
    if not keep_rows or not training.problem.is_widened:  # else each run is disturbed in its own way
        return orders
    return distinct(orders, plan, training.schedule.microbatches, exact.world_size)


def _noise_of(
    training: Training, world_size: int, exact: OracleObservation, batches: Batches
) -> tuple[dict[TensorKey, float], dict[TensorKey, torch.dtype]]:
    """Return how far each tensor of the other orders deviates, and its dtype; none of them is kept."""
    deviations = _Deviations(exact)
    for order in _reorderings(training, exact, batches):
        deviations.met.clear()
        _train(training, world_size, order, deviations.show, batches)
        if deviations.met < deviations.noise.keys():
            place = next(iter(deviations.noise.keys() - deviations.met))
            raise ValueError(f"expected the same tensors twice, got no {place.quantity} {place.name!r} again")
    return deviations.noise, deviations.dtypes


class _Deviations:
    """How far other runs deviate from the exact one, the farthest of all."""

    def __init__(self, exact: OracleObservation) -> None:
        self.noise = dict.fromkeys(_places(exact), 0.0)
        self.dtypes: dict[TensorKey, torch.dtype] = {}
        self.met: set[TensorKey] = set()  # in the run at hand
        self._exact = exact

    def show(
        self, quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0
    ) -> Mapping[str, _T]:
        """Compare tensors, and keep nothing."""
        if quantity is None:
            return {}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            place = TensorKey(quantity=quantity, step=step, name=name)
            self.met.add(place)
            self.dtypes[TensorKey(quantity=quantity, step=INITIAL_STEP, name=name)] = tensor.dtype
            if place in self.noise:
                value = self._exact.reference(quantity, step, rank)[name]
                assert value is not None  # or there would be no such place
                self.noise[place] = max(self.noise[place], largest_deviation(tensor, value))
        return {}


def _places(exact: OracleObservation) -> Iterator[TensorKey]:
    """Yield the place of every tensor in the order of training; buffers of all ranks have one."""

    def keys(quantity: Quantity, step: int) -> Iterator[TensorKey]:
        found = exact.reference(quantity, step, rank=0).items()
        return (
            TensorKey(quantity=quantity, step=step, name=name) for name, value in found if value is not None
        )

    last = len(exact.steps) - 1
    yield from keys(Quantity.INITIAL, INITIAL_STEP)
    for step in range(last + 1):
        for quantity in (Quantity.LOSS, Quantity.GRADIENT, Quantity.NORM, Quantity.PARAMETER):
            yield from keys(quantity, step)
    yield from keys(Quantity.OPTIMIZER_STATE, last)
    yield from keys(Quantity.BUFFER, last)


def _scales(exact: OracleObservation) -> dict[TensorKey, float]:
    scales: dict[TensorKey, float] = {}
    for place in _places(exact):
        scales[place] = _scale(exact, place, scales)
    return scales


def _scale(exact: OracleObservation, place: TensorKey, earlier: Mapping[TensorKey, float]) -> float:
    """Return the largest value that is rounded on the way to a tensor; ``earlier`` are those of the steps before."""
    match place.quantity:
        case Quantity.GRADIENT:
            sizes = exact.steps[place.step].sizes.get(place.name)
            # None where no loss reached the parameter: what the optimizer finds are the zeros of clearing.
            if sizes is None:
                return 0.0
            return sizes.absolute / exact.divisor * exact.clipping_factor(place.step, place.name)
        case Quantity.PARAMETER:
            before = earlier.get(replace(place, step=place.step - 1))
            start = largest(exact.initial[place.name]) if before is None else before
            return max(start, largest(exact.steps[place.step].parameters[place.name]))
        case Quantity.BUFFER:
            return max(largest(of_rank[place.name]) for of_rank in exact.buffers)
        case Quantity.INITIAL | Quantity.LOSS | Quantity.NORM | Quantity.OPTIMIZER_STATE:
            reference = exact.reference(place.quantity, place.step, rank=0)[place.name]
            return 0.0 if reference is None else largest(reference)


def _train(
    training: Training,
    world_size: int,
    summation: Summation,
    show: _Show,
    batches: Batches | None = None,
    drawing: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it holds nothing
) -> OracleObservation:
    """Run the whole schedule on one model, with the pieces of all ranks one after the other.

    What ``show`` returns of each tensor is what the observation has, which knows no noise.
    """
    model = cast_module(training.problem.build(), summation.dtype)
    parameters = dict(model.named_parameters())
    initial, built = show(Quantity.INITIAL, INITIAL_STEP, parameters), _copy(dict(model.named_buffers()))
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


def _copy(tensors: Mapping[str, _T], /) -> dict[str, _T]:
    return {name: None if t is None else t.detach().clone() for name, t in tensors.items()}
