"""The noise of an oracle: how far trainings with other orders of summation deviate from the exact one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from shardproof.harness.cases.batch import ModelBatch
from shardproof.harness.cases.training import Problem, Training
from shardproof.harness.cases.user_model import is_communicating, is_stepping
from shardproof.harness.oracle.absolute_error import deviation, largest, largest_deviation
from shardproof.harness.oracle.oracle_actor import Batches
from shardproof.harness.oracle.oracle_observation import (
    INITIAL_STEP,
    OracleObservation,
    Quantity,
    TensorKey,
)
from shardproof.harness.oracle.oracle_training import train
from shardproof.harness.oracle.reduction_orders import Summation, distinct, num_reorderings, reordering

_T = TypeVar("_T", torch.Tensor, torch.Tensor | None)


def _reorderings(training: Training, exact: OracleObservation, batches: Batches) -> list[Summation]:
    """Return the distinct orders of sums; if the model draws, rows stay with the numbers drawn for them."""
    plan, draws = training.plan, exact.draws
    numbers = range(num_reorderings(plan))
    orders = [replace(reordering(n, plan, training.convert), keeps_rows=draws) for n in numbers]
    keep_rows = draws or isinstance(batches.batch(step=0, microbatch=0, rank=0), ModelBatch)
    if not keep_rows or not training.problem.is_widened:  # otherwise each run is perturbed differently
        return orders
    return distinct(orders, plan, training.schedule.microbatches, exact.world_size)


def noise_device(problem: Problem, device: str) -> str:
    """Return where rounding is measured for ranks on a device: where the model's own code computes, or there."""
    return "cpu" if is_stepping(problem) or is_communicating(problem) else device


def noise_of(
    training: Training, world_size: int, exact: OracleObservation, batches: Batches, device: str = "cpu"
) -> Deviations:
    """Return the largest deviation and the dtype of each tensor over the other orders, whose tensors are not stored.

    They are computed on the ranks' device, whose kernels add in orders of their own.
    """
    deviations = Deviations(exact)
    for order in _reorderings(training, exact, batches):
        deviations.met.clear()
        train(training, world_size, replace(order, device=device), deviations.show, batches)
        if deviations.met < deviations.noise.keys():
            place = next(iter(deviations.noise.keys() - deviations.met))
            raise ValueError(f"expected the same tensors twice, got no {place.quantity} {place.name!r} again")
    return deviations


class Deviations:
    """The largest deviations of other runs from the exact one; those of still elements apart."""

    def __init__(self, exact: OracleObservation) -> None:
        self.noise = dict.fromkeys(_places(exact), 0.0)
        self.still_noise: dict[TensorKey, float] = {}
        self.dtypes: dict[TensorKey, torch.dtype] = {}
        self.met: set[TensorKey] = set()  # in the run at hand
        self._exact = exact

    def show(
        self, quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0
    ) -> Mapping[str, _T]:
        """Compare tensors, and store none."""
        if quantity is None:
            return {}
        for name, shown in tensors.items():
            if shown is None:
                continue
            tensor = shown.cpu()
            place = TensorKey(quantity=quantity, step=step, name=name)
            self.met.add(place)
            self.dtypes[TensorKey(quantity=quantity, step=INITIAL_STEP, name=name)] = tensor.dtype
            if place in self.noise:
                value = self._exact.reference(quantity, step, rank)[name]
                assert value is not None  # or there would be no such place
                still = self._exact.still_of(place)
                if still is None:
                    self.noise[place] = max(self.noise[place], largest_deviation(tensor, value))
                    continue
                found = deviation(tensor, value)
                self.noise[place] = max(self.noise[place], largest(found[~still]))
                self.still_noise[place] = max(self.still_noise.get(place, 0.0), largest(found[still]))
        return {}


def _places(exact: OracleObservation) -> Iterator[TensorKey]:
    """Yield the place of every tensor in the order of training; buffers of all ranks share one."""

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


def scales_of(exact: OracleObservation) -> dict[TensorKey, float]:
    """Return the largest value that is rounded in the computation of each tensor."""
    scales: dict[TensorKey, float] = {}
    for place in _places(exact):
        scales[place] = _scale(exact, place, scales)
    return scales


def _scale(exact: OracleObservation, place: TensorKey, earlier: Mapping[TensorKey, float]) -> float:
    """Return the largest value rounded in the computation of a tensor; ``earlier`` has those of previous steps."""
    match place.quantity:
        case Quantity.GRADIENT:
            sizes = exact.steps[place.step].sizes.get(place.name)
            # None if no loss reached the parameter: the optimizer finds the zeros of zero_grad.
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
