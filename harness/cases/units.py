"""Units - the submodules that a pattern such as ``layers.*`` matches, and their parameters - and stages of pipelines.

Everything is derived from names, never from an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from math import lcm, prod

from torch import nn

from shardproof.engine.contract import Layout, Plan, Roots
from shardproof.harness.cases.scripts.pipeline_order import Pipelined
from shardproof.harness.cases.training import Problem, Training
from shardproof.harness.cases.user_model import UserModel, frozen_parameters

ROOT = ""  # the unit of all parameters outside other units
# Engines that lay out parameters one after the other may align the start of each to this many bytes.
FLAT_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitParameters:
    """The parameters of one unit of a plan, each once under its first name, however often registered.

    ``shapes`` are whole.
    """

    unit: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes_per_element: int

    @property
    def num_bytes(self) -> int:
        return sum(map(prod, self.shapes)) * self.bytes_per_element

    def padded_bytes(self, num_ranks: int) -> int:
        """Count bytes where the first dim of each parameter is rounded up to a multiple of the ranks."""
        rounded = (-(-s[0] // num_ranks) * num_ranks * prod(s[1:]) if s else num_ranks for s in self.shapes)
        return sum(rounded) * self.bytes_per_element


def groups_of(training: Training, *, without: Iterable[str] = ()) -> tuple[UnitParameters, ...]:
    """Return the groups that own parameters: units in the order of the plan, then the root.

    A parameter belongs to the first unit that contains it, so inner units must come before those around them.
    ``without`` names parameters to leave out.
    """
    plan = replace(training.plan, ignored=(*training.plan.ignored, *without))
    key = (identity_of(training.problem), plan.units, plan.ignored, plan.roots)
    if key not in _known:
        _known[key] = groups_in(skeleton_of(training.problem), plan)
    return _known[key]


def ignored_that_train(training: Training) -> tuple[str, ...]:
    """Return the parameters that the plan ignores and that train: their gradients are the caller's to synchronise."""
    ignored = training.plan.ignored
    if not ignored:
        return ()
    frozen = frozen_parameters(training.problem, skeleton_of(training.problem))
    return tuple(name for name in ignored if name not in frozen)


def identity_of(problem: Problem) -> object:
    """Return the identity of a problem: its name, and more for users' models, which may share one."""
    return problem if isinstance(problem, UserModel) else problem.name


def skeleton_of(problem: Problem) -> nn.Module:
    """Return a module with the names and shapes of a problem's model; runs the problem's code only if it must."""
    return problem.skeleton() if isinstance(problem, UserModel) else problem.build()


# Laws ask for each step and rank, and building a model takes longer than all other parts of a judgement.
_known: dict[tuple[object, ...], tuple[UnitParameters, ...]] = {}


def groups_in(model: nn.Module, plan: Plan) -> tuple[UnitParameters, ...]:
    """Group the parameters of a model before any engine prepares it, as `groups_of` does."""
    return tuple(_groups(model, plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The number of ranks that share each parameter, gradient and state; 1 where every rank holds the whole."""

    parameters: int
    gradients: int
    state: int


def shares_of(plan: Plan, world_size: int) -> Shares:
    """Return the shares of the plan's layout; raises ValueError for `Layout.NATIVE`."""
    data_size = plan.data_size(world_size)
    parameters, gradients, state = 1, 1, data_size
    match plan.layout:
        case Layout.SHARD:
            parameters = gradients = data_size
        case Layout.HYBRID:
            (shards,) = (axis.size for axis in plan.axes(world_size) if axis.name == plan.data_axes[-1])
            parameters = gradients = state = shards
        case Layout.ZERO2:
            gradients = data_size
        case Layout.REPLICATE:
            state = 1
        case Layout.NATIVE:
            raise ValueError("shares_of: expected a plan that names a layout, got Layout.NATIVE")
    return Shares(parameters=parameters, gradients=gradients, state=state)


def num_shares_of(plan: Plan, world_size: int) -> int:
    """Return the number of ranks over which the plan shards each parameter, as `shares_of` does."""
    return shares_of(plan, world_size).parameters


def chunked_numel(groups: Iterable[UnitParameters], num_shares: int) -> int:
    """Return the maximum number of elements in a rank's stretches of all groups; see [Note: chunks]."""
    return sum(min(sum(map(prod, group.shapes)), chunked_buffer_numel(group, num_shares)) for group in groups)


def chunked_buffer_numel(group: UnitParameters, num_shares: int) -> int:
    """Return the maximum elements of a rank's buffer of a group; all have one size, padding included."""
    chunk = lcm(*(max(1, prod(shape[1:])) for shape in group.shapes))
    laid = sum(size + max(0, min(chunk, size) - 1) for size in map(prod, group.shapes))
    return chunk * -(-laid // (num_shares * chunk))


def _groups(model: nn.Module, plan: Plan) -> Iterator[UnitParameters]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken = {model.get_parameter(name) for name in plan.ignored}
    # With several roots none owns the parameters outside of them.
    units = plan.units if plan.roots is Roots.EACH_UNIT else (*plan.units, ROOT)
    for unit in units:
        inside = (p for name in unit.split(",") for p in model.get_submodule(name).parameters())
        own: dict[nn.Parameter, None] = dict.fromkeys(p for p in inside if p not in taken)
        taken |= own.keys()
        if own:
            yield UnitParameters(
                unit=unit,
                names=tuple(names[p] for p in own),
                shapes=tuple(tuple(p.shape) for p in own),
                bytes_per_element=max(p.element_size() for p in own),
            )


def matching_units(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the submodules that the patterns match, in the model's order; each must match one that has parameters.

    Inner ones come before those around them. A ``*`` stands for one part of a name: ``layers.*`` matches ``layers.0``
    and not ``layers.0.mlp``. Raises ValueError for a pattern that matches none.
    """
    names = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            raise ValueError(
                f"unit {pattern!r} matches no submodule with parameters; there are {_some(names)}"
            )
    matching = [name for name in names if any(_matches(pattern, name) for pattern in patterns)]
    for name in matching:
        module = model.get_submodule(name)
        if not is_called(module):
            parts = [f"{name}.{part}" for part, inner in module.named_children() if is_called(inner)]
            raise ValueError(
                f"unit {name!r} is a {type(module).__name__}, which is not called: engines gather a unit for its "
                f"forward; name the modules in it, such as {_some(parts, 2)}"
            )
    return tuple(sorted(matching, key=lambda name: -name.count(".")))


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own, which containers such as ModuleList do not."""
    return type(module).forward is not nn.Module.forward


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _some(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"


def num_stages(training: Training) -> int:
    """Count the stages of the whole pipeline; 1 where there is none."""
    script = training.script
    per_rank = script.order.stages_per_rank if isinstance(script, Pipelined) else 1
    return training.plan.pipeline_stages * per_rank


def stages_of(training: Training, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the stages of one rank, in order, dealt round-robin along the outermost mesh axis."""
    ring = training.plan.pipeline_stages
    return tuple(range(rank // (world_size // ring), num_stages(training), ring))


def is_on_rank(training: Training, rank: int, world_size: int, name: str) -> bool:
    """Return whether a rank's stages have a parameter or buffer of that name; always true where there are no stages."""
    if training.plan.pipeline_stages == 1:
        return True
    names = _names(training.problem, num_stages(training))  # type: ignore[arg-type]  # Protocol without a hash
    return any(name in names[stage] for stage in stages_of(training, rank, world_size))


@cache  # problems are frozen values
def _names(problem: Problem, count: int) -> tuple[frozenset[str], ...]:
    if problem.stages is None:
        raise ValueError(f"problem {problem.name!r}: expected one that can be cut into stages")
    return tuple(
        frozenset(
            name for tensors in (stage.named_parameters(), stage.named_buffers()) for name, _ in tensors
        )
        for stage in problem.stages(problem.build(), count)
    )
