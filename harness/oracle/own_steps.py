"""The reference of a user's own training step: all ranks at once, gradients averaged at the end of each backward.

See [Note: own steps]. A reduction there, and not in the optimizer's step, lets the user's code clip or edit what it
finds, as beside an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.engine.contract import Plan
from shardproof.harness.cases.batch import Batch, ModelBatch
from shardproof.harness.cases.draws import Seeds, has_drawn
from shardproof.harness.cases.own_step import ModelInStep, OptimizerInStep, losses_in, parts_of
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import StepSchedules, UserModel
from shardproof.harness.oracle.oracle_actor import Batches, StackedPieces
from shardproof.harness.oracle.oracle_observation import (
    INITIAL_STEP,
    LOSSES,
    OracleObservation,
    OracleStep,
    Quantity,
    constants_of,
    sizes_of,
)
from shardproof.harness.oracle.reduction_orders import Summation
from shardproof.harness.torch_compat.dispatch import call_after_backward
from shardproof.harness.torch_compat.dtypes import cast_module
from shardproof.harness.worlds.threads.together import Inside, together

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Row = list[torch.Tensor]  # one backward's gradients of a parameter: one of each rank
_Found = Mapping[str, torch.Tensor]


class _Exchange:
    """What each rank's backwards found, which all ranks read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._found: dict[int, dict[int, _Found]] = {}

    def of_all(self, number: int, rank: int, found: _Found) -> list[_Found]:
        """Deposit what a rank's backward found; returns that of all ranks, once all have it."""
        self._found.setdefault(number, {})[rank] = found
        dist.barrier()
        self._found.pop(number - 2, None)  # all have read it before they came to the last one
        return [self._found[number][other] for other in range(self.size)]


class SteppingRank:
    """One rank's model and optimizers.

    ``rows`` are the pieces of each gradient since it was cleared, and ``stepped`` those that the last update used.
    ``reached`` are the parameters that each backward reached on each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        exchange: _Exchange,
        rank: int,
        reduce: Callable[[Sequence[Row]], torch.Tensor],
    ) -> None:
        self.model, self.rank = model, rank
        self.parameters = dict(model.named_parameters())
        self.optimizer = make(list(self.parameters.values()))
        self.rows: dict[str, list[Row]] = {}
        self.stepped: dict[str, list[Row]] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.reached: list[tuple[frozenset[str], ...]] = []
        self.losses: list[float] = []
        self._exchange, self._mean = exchange, reduce
        self._new: dict[str, torch.Tensor] = {}
        # The nodes that accumulate, which torch would make anew, without the hook, if nothing held them.
        self._nodes = {n: _accumulator(p) for n, p in self.parameters.items() if p.requires_grad}
        for name, node in self._nodes.items():
            node.register_prehook(partial(self._arrived, name))

    def play(self, problem: UserModel, batch: Batch) -> None:
        """Run the user's step."""
        self.gradients, self.stepped = {}, {}
        assert isinstance(batch, ModelBatch)
        model = ModelInStep(self.model, torch.Tensor.backward, (self.model,))
        optimizers = [OptimizerInStep(part, self._step, self._zero_grad) for part in parts_of(self.optimizer)]
        self.losses = list(losses_in(problem.own_step(model, batch.value, *optimizers)))

    # Any: as autograd calls a hook.
    def _arrived(self, name: str, gradients: tuple[Any, ...]) -> tuple[torch.Tensor]:
        """Take a gradient out before it is accumulated; zeros go in its place until all ranks have theirs."""
        if not self._new:
            call_after_backward(self._reduce)
        found = gradients[0].detach()
        self._new[name] = self._new[name] + found if name in self._new else found.clone()
        return (torch.zeros_like(found),)

    @torch.no_grad()
    def _reduce(self) -> None:
        new, self._new = self._new, {}
        of_ranks = self._exchange.of_all(len(self.reached), self.rank, new)
        self.reached.append(tuple(frozenset(found) for found in of_ranks))
        for name, parameter in self.parameters.items():
            found = [of_rank.get(name) for of_rank in of_ranks]
            some = next((piece for piece in found if piece is not None), None)
            if some is None:
                continue
            row = [torch.zeros_like(some) if piece is None else piece for piece in found]
            self.rows.setdefault(name, []).append(row)
            mean = self._mean([row])
            parameter.grad = mean if parameter.grad is None else parameter.grad.detach() + mean

    def _step(self, part: torch.optim.Optimizer) -> None:
        for name in self._names(part):
            gradient = self.parameters[name].grad
            if gradient is not None:
                self.gradients[name] = gradient.detach().clone()
                self.stepped[name] = list(self.rows.get(name, ()))
        part.step()

    def _zero_grad(self, part: torch.optim.Optimizer, set_to_none: bool) -> None:
        for name in self._names(part):
            self.rows.pop(name, None)
        part.zero_grad(set_to_none)

    def _names(self, part: torch.optim.Optimizer) -> list[str]:
        given = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        return [name for name, parameter in self.parameters.items() if id(parameter) in given]

    @property
    def updated(self) -> frozenset[str]:
        """The parameters that the optimizers received."""
        return frozenset(self._names(self.optimizer))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the optimizers' state, by parameter and key."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }


class SteppingWorld:
    """The ranks of one training by a user's own step, in one order of sums."""

    def __init__(
        self, problem: UserModel, make: MakeOptimizer, size: int, summation: Summation, plan: Plan
    ) -> None:
        self.problem, self.summation = problem, summation
        self.draws = False
        exchange, reduce = _Exchange(size), partial(summation.reduce, plan=plan)

        def built(rank: int) -> SteppingRank:
            model = cast_module(problem.build(), summation.dtype)
            return SteppingRank(model, make, exchange, rank, reduce)

        self.ranks = together(size, built)

    def step(self, step: int, batches: Callable[..., Batch], inside: Inside = nullcontext) -> None:
        """Take one step on all ranks; raises ValueError if they then hold other parameters."""

        def play(number: int) -> None:
            rank = self.ranks[number]
            batch = self.summation.prepare(batches(step=step, microbatch=0, rank=number))
            Seeds(step=step, rank=number).begin(0)
            with has_drawn(self._drew):
                rank.play(self.problem, batch)

        together(len(self.ranks), play, inside)
        first, *others = self.ranks
        for name, parameter in first.parameters.items():
            if not all(torch.equal(other.parameters[name], parameter) for other in others):
                raise ValueError(f"step() leaves other values of {name!r} on each rank, on one process too")

    def _drew(self) -> None:
        self.draws = True


def _accumulator(parameter: nn.Parameter) -> Any:  # Any: a node of autograd
    node: Any = parameter.expand_as(parameter).grad_fn
    return node.next_functions[0][0]


# Any: see `ShowTensors` in harness.oracle.oracle_training.
def train_by_own_steps(
    training: Training,
    world_size: int,
    summation: Summation,
    show: Callable[..., Any],
    batches: Batches,
    inside: Inside,
) -> OracleObservation:
    """Run the whole schedule; the observation is that of the first rank, except for buffers."""
    assert isinstance(training.problem, UserModel)
    schedules = StepSchedules(training.optimizer)
    world = SteppingWorld(training.problem, schedules.factory, world_size, summation, training.plan)
    first, last = world.ranks[0], training.schedule.steps - 1
    initial = show(Quantity.INITIAL, INITIAL_STEP, first.parameters)
    built = {name: buffer.clone() for name, buffer in first.model.named_buffers()}
    steps = []
    for step in range(last + 1):
        world.step(step, batches.batch, inside)
        schedules.step()
        losses = torch.tensor([rank.losses for rank in world.ranks], dtype=torch.float64).T.contiguous()
        show(Quantity.LOSS, step, {LOSSES: losses})
        gradients: dict[str, torch.Tensor | None] = {n: first.gradients.get(n) for n in first.parameters}
        steps.append(
            OracleStep(
                losses=losses,
                contributions=show(None, step, StackedPieces(first.stepped)),
                gradients=show(Quantity.GRADIENT, step, gradients),
                parameters=show(Quantity.PARAMETER, step, first.parameters),
                sizes={name: sizes_of(rows) for name, rows in first.stepped.items() if rows},
            )
        )
    buffers = [dict(rank.model.named_buffers()) for rank in world.ranks]
    return OracleObservation(
        world_size=world_size,
        plan=training.plan,
        initial=initial,
        steps=tuple(steps),
        optimizer_state=show(Quantity.OPTIMIZER_STATE, last, first.state()),
        buffers=tuple(show(Quantity.BUFFER, last, of_rank, rank) for rank, of_rank in enumerate(buffers)),
        noise={},
        scales={},
        constants=constants_of(built, buffers),
        dtypes={},
        is_exact=False,
        draws=world.draws,
        is_widened=training.problem.is_widened,
        untrained=frozenset(first.parameters) - first.updated,
    )
