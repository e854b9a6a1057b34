"""One training of the oracle: the whole schedule on one model, in one order of sums, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from shardproof.harness.cases.training import LoopOrder, Training
from shardproof.harness.cases.user_model import StepSchedules, is_stepping, written_by_forward
from shardproof.harness.oracle.oracle_actor import (
    Batches,
    OracleModels,
    Pieces,
    ProbesOfRanks,
    StackedPieces,
    changed_by_forward,
    dense_pieces,
    parameters_apart,
    pieces_of_step,
)
from shardproof.harness.oracle.oracle_observation import (
    INITIAL_STEP,
    LOSSES,
    NORM,
    OracleObservation,
    OracleStep,
    Quantity,
    Tensors,
    constants_of,
    sizes_of,
)
from shardproof.harness.oracle.own_steps import train_by_own_steps
from shardproof.harness.oracle.reduction_orders import Summation
from shardproof.harness.oracle.rounding import rounding_anew
from shardproof.harness.torch_compat.dtypes import cast_module, dense
from shardproof.harness.tracing.probe_point import ValueKind
from shardproof.harness.worlds.threads.together import Inside

_T = TypeVar("_T", torch.Tensor, torch.Tensor | None)


class KeepTensors(Protocol):
    """Stores tensors that will change, in memory or elsewhere."""

    def __call__(self, tensors: Mapping[str, _T], /) -> Mapping[str, _T]:
        """Return their current values."""


class ShowTensors(Protocol):
    """Receives the tensors of a training, in order; ``quantity`` is None for values that only explain a failure."""

    def __call__(
        self, quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0, /
    ) -> Mapping[str, _T]:
        """Return what the observation stores of it."""


def train(
    training: Training,
    world_size: int,
    summation: Summation,
    show: ShowTensors,
    batches: Batches | None = None,
    drawing: Inside = nullcontext,
    probes: ProbesOfRanks | None = None,
) -> OracleObservation:
    """Run the whole schedule on one model, with the pieces of all ranks one after the other.

    The observation contains what ``show`` returns for each tensor, and no noise.
    """
    if is_stepping(training.problem):
        made, rounding = batches or Batches(training.problem), _rounding(training, summation)
        return train_by_own_steps(
            training, world_size, summation, show, made, partial(_both, drawing, rounding)
        )
    trained = _Trained(training, summation, drawing, probes)
    if training.before is not None and training.origin is not None:
        trained.train_before(training.before, training.origin.ranks.of(world_size), batches)
    initial = show(Quantity.INITIAL, INITIAL_STEP, trained.parameters)
    built = copied(changed_by_forward(trained.model, trained.written))
    models = OracleModels(training.problem, trained.model, world_size, summation, batches, probes)
    if probes is not None:
        probes.shared(ValueKind.INITIAL, INITIAL_STEP, trained.parameters)
        probes.shared(ValueKind.STATE, INITIAL_STEP, trained.state())
    last = training.schedule.steps - 1
    buffers_before: tuple[Tensors, ...] = ()
    steps = []
    for step in range(last + 1):
        if step == last:
            buffers_before = tuple(
                show(None, step, buffers, rank) for rank, buffers in enumerate(models.buffers())
            )
        steps.append(trained.step(training, models, step, show))
    of_ranks = models.buffers()
    return OracleObservation(
        world_size=world_size,
        plan=training.plan,
        initial=initial,
        steps=tuple(steps),
        optimizer_state=show(Quantity.OPTIMIZER_STATE, last, trained.state()),
        buffers=tuple(show(Quantity.BUFFER, last, buffers, rank) for rank, buffers in enumerate(of_ranks)),
        noise={},
        scales={},
        constants=constants_of(built, of_ranks),
        dtypes={},
        is_exact=False,
        draws=models.draws or trained.has_drawn_before,
        is_widened=training.problem.is_widened,
        is_trained_before=training.origin is not None,
        untrained=trained.untrained(),
        state_before=trained.state_before,
        buffers_before=buffers_before,
    )


class _Trained:
    """A model and its optimizer, which are trained in one order of sums."""

    def __init__(
        self, training: Training, summation: Summation, drawing: Inside, probes: ProbesOfRanks | None = None
    ) -> None:
        self._probes = probes
        self.model = cast_module(training.problem.build(), summation.dtype).to(summation.device)
        self.written = written_by_forward(training.problem)
        self.parameters = parameters_apart(self.model, self.written)
        self.state_before: Tensors = {}  # before the last step
        self.has_drawn_before = False
        self._schedules = StepSchedules(training.optimizer)
        self._optimizer = self._schedules.factory(list(self.model.parameters()))
        self._summation, self._drawing = summation, drawing
        self._disturbing = _rounding(training, summation)
        # Engines add up norms in other orders, and in more bits or in fewer, whatever the order of the gradients' sums.
        self._disturbing_norms = nullcontext() if summation.seed is None else rounding_anew(summation.seed)

    def train_before(self, before: Training, num_ranks: int, batches: Batches | None) -> None:
        """Take the steps of the previous world; a fresh model that loads their state has no gradients."""
        models = OracleModels(before.problem, self.model, num_ranks, self._summation, batches)
        probes, self._probes = self._probes, None
        for step in range(before.schedule.steps):
            self.step(before, models, step, kept_nowhere)
        self._probes = probes
        self._forget_gradients()
        self.has_drawn_before = models.draws
        with torch.no_grad():
            own = changed_by_forward(self.model, self.written)
            for name, changed in models.buffers()[0].items():
                own[name].copy_(changed)
        if extra := models.extra_state():
            self.model.load_state_dict(extra, strict=False)

    def _forget_gradients(self) -> None:
        """Clear gradients, as in a fresh model: those of parameters outside the optimizer have accumulated."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, training: Training, models: OracleModels, step: int, show: ShowTensors) -> OracleStep:
        """Take one step."""
        resume = training.resume
        if resume is not None and resume.plan is not None and step == resume.after_steps:
            self._forget_gradients()
        losses, contributions = self._pieces(training, models, step)
        show(Quantity.LOSS, step, {LOSSES: losses})
        is_skipped = training.schedule.is_skipped(step)
        if is_skipped:
            for name in contributions:  # existing gradients will be cleared, perhaps to zeros
                self.parameters[name].grad = torch.zeros_like(self.parameters[name])
            contributions = {}
        self._reduce(training, contributions)
        contributions = dense_pieces(contributions)
        is_reference = self._summation.seed is None
        sizes = {name: sizes_of(pieces) for name, pieces in contributions.items()} if is_reference else {}
        kept_pieces = show(None, step, StackedPieces(contributions))
        contributions.clear()  # the peak of memory
        if not is_skipped:
            self._see(ValueKind.REDUCED, step, self._gradients())
        with self._disturbing_norms:
            norm = None if is_skipped else clip(training, self.parameters)
        if norm is not None:
            self._see(ValueKind.NORM, step, {NORM: norm})
            self._see(ValueKind.CLIPPED, step, self._gradients())
        found = {} if is_skipped else {name: parameter.grad for name, parameter in self.parameters.items()}
        gradients = show(Quantity.GRADIENT, step, dense_tensors(found))
        show(Quantity.NORM, step, {} if norm is None else {NORM: norm})
        if step == training.schedule.steps - 1:
            self.state_before = show(None, step, self.state())
        with self._disturbing_norms:
            if training.plan.clip_in_step is not None and not is_skipped:
                nn.utils.clip_grad_norm_(self.parameters.values(), training.plan.clip_in_step)
        with self._disturbing:
            _update(training, self._optimizer, step)
        self._schedules.step()
        self._see(ValueKind.UPDATED, step, self.parameters)
        self._see(ValueKind.STATE, step, self.state())
        return OracleStep(
            losses=losses,
            contributions=kept_pieces,
            gradients=gradients,
            parameters=show(Quantity.PARAMETER, step, self.parameters),
            sizes=sizes,
            norm=norm,
        )

    def _gradients(self) -> Tensors:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}

    def _see(self, kind: ValueKind, step: int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        if self._probes is not None:
            self._probes.shared(kind, step, dense_tensors(tensors))

    def _pieces(self, training: Training, models: OracleModels, step: int) -> tuple[torch.Tensor, Pieces]:
        return pieces_of_step(training, models, step, partial(_both, self._drawing, self._disturbing))

    def _reduce(self, training: Training, contributions: Pieces) -> None:
        for name, pieces in contributions.items():
            # Cleared before, to None or to zeros, unless the optimizer did not receive the parameter.
            reduced, left = self._summation.reduce(pieces, training.plan), self.parameters[name].grad
            self.parameters[name].grad = reduced if left is None else left + reduced

    def untrained(self) -> frozenset[str]:
        """Return the names of the parameters that the optimizer did not receive."""
        given = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return frozenset(name for name, parameter in self.parameters.items() if id(parameter) not in given)

    def state(self) -> Tensors:
        """Return the tensors of the optimizer's state, by parameter and key."""
        found = {
            f"{name}/{key}": value
            for name, p in self.parameters.items()
            for key, value in self._optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }
        return dense_tensors(found)


def _rounding(training: Training, summation: Summation) -> AbstractContextManager[object]:
    is_disturbed = summation.seed is not None and not training.problem.is_widened
    return rounding_anew(summation.seed or 0) if is_disturbed else nullcontext()


@contextmanager
def _both(drawing: Inside, rounding: AbstractContextManager[object]) -> Iterator[None]:
    """Draw and round on the calling thread as a run does."""
    with drawing(), rounding:
        yield


def kept_nowhere(
    quantity: Quantity | None, step: int, tensors: Mapping[str, _T], rank: int = 0, /
) -> Mapping[str, _T]:
    """Keep nothing of a training."""
    return {}


def clip(training: Training, parameters: Mapping[str, nn.Parameter]) -> torch.Tensor | None:
    """Clip gradients in place as the schedule asks, and return their norm; None if it does not."""
    asked = training.schedule.clip
    if asked is None:
        return None
    return nn.utils.clip_grad_norm_(parameters.values(), asked.max_norm, asked.norm_type).detach()


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


def dense_tensors(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Convert sparse tensors to dense ones."""
    return {name: None if t is None else dense(t) for name, t in tensors.items()}


def copied(tensors: Mapping[str, _T], /) -> dict[str, _T]:
    """Copy tensors in memory."""
    return {name: None if t is None else t.detach().clone() for name, t in tensors.items()}
