"""Which parameters a plan puts into which communication group; worked out from names, never asked of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm, prod

from torch import nn

from shardproof.engine.contract import Layout, Plan, Roots
from shardproof.harness.cases.model_facts import UnitParameters
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import UserModel

ROOT = ""  # the unit of what no other unit takes


def groups_of(training: Training) -> tuple[UnitParameters, ...]:
    """Return the groups that own parameters: units in the order of the plan, then the root.

    A parameter belongs to the first unit that contains it, so inner units must come before those around them.
    """
    plan, problem = training.plan, training.problem
    # The code of a user's model never runs in the process that judges.
    if isinstance(problem, UserModel) and problem.facts.groups and plan.units == problem.units:
        return problem.facts.groups
    key = (
        training.problem.name,
        plan.units,
        plan.ignored,
        plan.roots,
    )  # a name stands for one problem everywhere
    if key not in _known:
        _known[key] = groups_in(training.problem.build(), plan)
    return _known[key]


# Laws ask for each step and rank, and building a model takes longer than all the rest of judging.
_known: dict[tuple[object, ...], tuple[UnitParameters, ...]] = {}


def groups_in(model: nn.Module, plan: Plan) -> tuple[UnitParameters, ...]:
    """Group the parameters of a model that no engine has prepared yet, as `groups_of` does."""
    return tuple(_groups(model, plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Over how many ranks a plan shards what belongs to each parameter; 1 where every rank holds the whole."""

    parameters: int
    gradients: int
    state: int


def shares_of(plan: Plan, world_size: int) -> Shares:
    """Return what the plan's layout shards; raises ValueError for `Layout.NATIVE`."""
    parameters, gradients, state = 1, 1, world_size
    match plan.layout:
        case Layout.SHARD:
            parameters = gradients = world_size
        case Layout.HYBRID:
            parameters = gradients = state = plan.axes(world_size)[-1].size
        case Layout.ZERO2:
            gradients = world_size
        case Layout.REPLICATE:
            state = 1
        case Layout.NATIVE:
            raise ValueError("shares_of: expected a plan that names a layout, got Layout.NATIVE")
    return Shares(parameters=parameters, gradients=gradients, state=state)


def num_shares_of(plan: Plan, world_size: int) -> int:
    """Return over how many ranks the plan shards each parameter, as `shares_of` does."""
    return shares_of(plan, world_size).parameters


def chunked_numel(groups: Iterable[UnitParameters], num_shares: int) -> int:
    """Return the most elements that a rank's stretches of all groups can have; see [Note: chunks]."""
    most = 0
    for group in groups:
        chunk = lcm(*(max(1, prod(shape[1:])) for shape in group.shapes))
        sizes = [prod(shape) for shape in group.shapes]
        laid = sum(size + max(0, min(chunk, size) - 1) for size in sizes)
        most += min(sum(sizes), chunk * -(-laid // (num_shares * chunk)))
    return most


def _groups(model: nn.Module, plan: Plan) -> Iterator[UnitParameters]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken = {model.get_parameter(name) for name in plan.ignored}
    # With several roots none owns what is outside of them.
    units = plan.units if plan.roots is Roots.EACH_UNIT else (*plan.units, ROOT)
    for unit in units:
        inside = (p for name in unit.split(",") for p in model.get_submodule(name).parameters())
        own: dict[nn.Parameter, None] = dict.fromkeys(p for p in inside if p not in taken)
        taken |= own.keys()
        if own:
            first = next(iter(own))
            yield UnitParameters(
                unit=unit,
                names=tuple(names[p] for p in own),
                shapes=tuple(tuple(p.shape) for p in own),
                bytes_per_element=first.element_size(),
            )
