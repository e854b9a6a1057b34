"""Mutants that mistake parameters for each other: one parameter for two, or two for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.adapters.composable import members
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, PreparedModel, Shard
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Grouping


class _PreparedUntied(PreparedReference):
    """Shows nobody the copies."""

    copies: frozenset[str] = frozenset()

    def local_parameters(self) -> Mapping[str, Shard]:
        return {n: s for n, s in super().local_parameters().items() if n not in self.copies}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        return {n: s for n, s in super().local_gradients().items() if n not in self.copies}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        state = super().local_optimizer_state()
        return {n: s for n, s in state.items() if n.rpartition("/")[0] not in self.copies}


@mutant(
    after="verl-project/verl#7834",
    kills_on=Condition(world_size=1, because="a parameter with one use stays what it is"),
)
class UntiesSharedParameters(ReferenceEngine):
    """Each use of a tied parameter gets a copy of its own.

    Reported: tied weights were loaded into two parameters, which then drifted apart.
    """

    prepared_type = _PreparedUntied

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Untie, then prepare honestly."""
        plan.refuse_beyond(self.capabilities)
        copies = frozenset(name for _, *others in _ties(model) for name in others)
        for name in copies:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(model.get_parameter(name).detach().clone()))
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, _PreparedUntied)
        prepared.copies = copies
        return prepared


class _PreparedForgetfulOfRows(PreparedFullyShard):
    lost: tuple[nn.Parameter, ...] = ()

    @torch.no_grad()
    def step(self) -> None:
        shards = [p.to_local().detach() for p in self.lost if isinstance(p, DTensor)]
        kept = [shard.clone() for shard in shards]
        super().step()
        for shard, before in zip(shards, kept, strict=True):
            shard.copy_(before)


@mutant(
    after="pytorch/pytorch#176076",
    kills_on=Condition(because="a rank that owns all rows is left in peace, and so is what is not tied"),
)
class LosesTheLastRowsOfSharedParameters(FullyShardEngine):
    """The last rank's rows of a tied parameter keep their initial values.

    Reported: of a weight tied across two groups, with rows that do not divide evenly, the rows of the last rank
    kept their initial values.
    """

    prepared_type = _PreparedForgetfulOfRows

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Join the units that share, shard honestly, and freeze the last rank's rows."""
        plan.refuse_beyond(self.capabilities)
        shared = [first for first, *_ in _ties(model)]
        prepared = super().prepare(model, replace(plan, units=_joined(model, plan.units)), mesh)
        assert isinstance(prepared, _PreparedForgetfulOfRows)
        if mesh.get_local_rank() == mesh.size() - 1 > 0:
            prepared.lost = tuple(model.get_parameter(name) for name in shared)
        return prepared


@mutant(
    after="pytorch/pytorch#176225",
    kills_on=Condition(world_size=1, because="the first model of a training is the only one of its names"),
    trace=Trace.CRASH,
)
class TellsParametersApartByName(FullyShardEngine):
    """A second model is taken for the first.

    Reported: parameters were remembered by an id that others were given later, so layers made one after another
    were taken for each other.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, torch.Size]] = set()

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Look whether it knows the parameters, then shard honestly."""
        plan.refuse_beyond(self.capabilities)
        for name, parameter in model.named_parameters():
            key = (name, parameter.shape)
            if key in self._known:
                raise ValueError(f"parameter {name!r} is managed by another group already")
            self._known.add(key)
        return super().prepare(model, plan, mesh)


@mutant(
    after="huggingface/accelerate#4171",
    kills_on=Condition(
        plan=Plan(grouping=Grouping.REQUIRED), because="needs a group of modules that are tied"
    ),
    trace=Trace.CRASH,
)
class SplitsTiedModules(ReferenceEngine):
    """Modules of one group that share a parameter become groups of their own.

    Reported: the last layers were grouped apart from the embedding that they were tied to, and no such model could
    run.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Split the groups that share, then prepare honestly."""
        tied = {model.get_parameter(first) for first, *_ in _ties(model)}
        units: list[str] = []
        for unit in plan.units:
            shares = any(tied & {*m.parameters()} for m in members(model, unit))
            units += unit.split(",") if shares else [unit]
        return super().prepare(model, replace(plan, units=tuple(units)), mesh)


def _ties(model: nn.Module) -> list[list[str]]:
    """Name all uses of each parameter that has several."""
    uses: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, []).append(name)
    return [names for names in uses.values() if len(names) > 1]


def _joined(model: nn.Module, units: tuple[str, ...]) -> tuple[str, ...]:
    """Make one unit of all that use a tied parameter."""
    tied = {model.get_parameter(first) for first, *_ in _ties(model)}
    sharing = [unit for unit in units if any(tied & {*m.parameters()} for m in members(model, unit))]
    return (*(unit for unit in units if unit not in sharing), *([",".join(sharing)] if sharing else []))
