"""Studies a user's own training step by a few steps of two ranks, as `study` does for a loss."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardproof.engine.capability import Capability
from shardproof.engine.plan import Plan
from shardproof.harness.cases.user_model import (
    ModelFacts,
    StepSchedules,
    TensorOutline,
    UserModel,
    UserOptimizer,
    definition,
)
from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.oracle.own_steps import MakeOptimizer, SteppingWorld
from shardproof.harness.oracle.reduction_orders import EXACT_ORDER, OWN_ORDER, Summation
from shardproof.harness.oracle.rounding import noticing_narrow
from shardproof.harness.oracle.still_elements import ZERO_BESIDE
from shardproof.harness.runner.user_model.study import ModelStudy, called, demands_of, evaluating_modules

_STEPS, _RANKS = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Some steps of two ranks: the largest gradient of each parameter, and what each backward reached on each rank."""

    world: SteppingWorld
    sizes: dict[str, float]
    reached: list[tuple[frozenset[str], ...]]
    losses: list[float]
    step_s: float


def study_step(
    problem: UserModel,
    units: tuple[str, ...],
    outline: Iterable[TensorOutline],
    optimizer: UserOptimizer | None,
) -> ModelStudy:
    """Find out what `study` does, from whole steps; a step is given a model and optimizers, on ranks and here."""
    make: MakeOptimizer = torch.optim.AdamW if optimizer is None else StepSchedules(optimizer).factory
    narrow = list[bool]()
    own = _run(problem, make, OWN_ORDER, partial(narrow.append, True))
    _check(own, _run(problem, make, OWN_ORDER))
    wanted: bool | None = getattr(definition(problem.spec), "float64", None)
    is_widened, run = not narrow if wanted is None else wanted, own
    if is_widened:
        try:
            run = _run(problem, make, EXACT_ORDER)
        except ValueError:
            if wanted:
                raise
            is_widened = False
    model = run.world.ranks[0].model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    zero = 1e3 * ZERO_BESIDE * max(run.sizes.values(), default=0.0)
    facts = ModelFacts(
        frozen=tuple(name for name, p in model.named_parameters() if not p.requires_grad),
        evaluating=tuple(evaluating_modules(problem.build())),
        uncounted=problem.unsplit,
        not_in_bfloat16=problem.unsplit,
        unscaled=problem.unsplit,
        unevaluated=problem.unsplit,
    )
    found = replace(
        problem,
        units=units,
        outline=tuple(outline),
        is_widened=is_widened,
        idle=tuple(name for name, _ in model.named_parameters() if not run.sizes.get(name, 0.0) > zero),
        demands=frozenset(_demands(run, trained, optimizer)),
        facts=facts,
    )
    return ModelStudy(model=found, optimizer=optimizer, pass_s=own.step_s)


def _run(
    problem: UserModel, make: MakeOptimizer, summation: Summation, narrow: partial[None] | None = None
) -> _Run:
    world = called("optimizer()", lambda: SteppingWorld(problem, make, _RANKS, summation, Plan()))
    inside = partial(noticing_narrow, narrow) if narrow else None
    sizes: dict[str, float] = {}
    losses = []
    started = time.monotonic()
    for step in range(_STEPS):
        called("step()", partial(world.step, step, problem.batch, *([inside] if inside else [])))
        first = world.ranks[0]
        losses += [loss for rank in world.ranks for loss in rank.losses]
        for name, gradient in first.gradients.items():
            sizes[name] = max(sizes.get(name, 0.0), largest(gradient))
    return _Run(
        world=world,
        sizes=sizes,
        reached=world.ranks[0].reached,
        losses=losses,
        step_s=(time.monotonic() - started) / _STEPS / _RANKS,
    )


def _check(run: _Run, again: _Run) -> None:
    """Raise ValueError for a step that shows nothing, or computes something else the second time."""
    if not any(run.sizes.values()):
        raise ValueError(
            "step() updates no parameter that has a gradient: does it call backward() on a loss, then step() of an "
            "optimizer that it is given, before zero_grad()?"
        )
    if not run.losses:
        raise ValueError("step() returned no loss: return one, or a tuple or mapping of several")
    if run.losses != again.losses:
        raise ValueError(
            "step() returned other losses the second time, for equal parameters, data and seed of torch: does it draw "
            "from Python's or NumPy's generator, or remember earlier calls?"
        )


def _demands(run: _Run, trained: set[str], optimizer: UserOptimizer | None) -> list[Capability]:
    reached = [of_rank for of_ranks in run.reached for of_rank in of_ranks]
    demands = [Capability.UNUSED] if any(trained - found for found in reached) else []
    if any(len(set(of_ranks)) > 1 for of_ranks in run.reached):
        demands.append(Capability.RANK_DEPENDENT)
    built, after = run.world.problem.build(), dict(run.world.ranks[0].model.named_buffers())
    if any(not torch.equal(after[name].to(b.dtype), b) for name, b in built.named_buffers()):
        demands.append(Capability.OWN_BUFFERS)
    demands += [] if optimizer is None else demands_of(optimizer, _with_gradients(run))
    return demands


def _with_gradients(run: _Run) -> torch.nn.Module:
    """Return a fresh model with the gradients of the last update."""
    model, rank = run.world.problem.build(), run.world.ranks[0]
    for name, gradient in rank.gradients.items():
        parameter = model.get_parameter(name)
        parameter.grad = gradient.to(parameter.dtype)
    return model
