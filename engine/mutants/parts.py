"""Mutants for whom a model is nothing but its forward: parts, groups run in part, and methods are lost on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.composable import members
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.capability import Capability
from engine.contract import Plan, PreparedModel, UnitHandle
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Accumulation, Grouping

_GROUPS = Plan(grouping=Grouping.REQUIRED, units=("first,second",))
_METHODS = Plan(forward_methods=(("encoder", "encode"),), units=("encoder",))


class _PreparedForTheRoot(PreparedReference):
    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        self._set_gradient_sync(is_on=True)
        return super().__call__(*inputs, **named)

    def part(self, name: str) -> nn.Module:
        self._set_gradient_sync(is_on=False)
        return super().part(name)


@mutant(
    after="NVIDIA/Megatron-LM#6693",
    kills_on=Condition(
        world_size=1,
        steps=2,
        plan=Plan(demands=frozenset({Capability.PARTS})),
        because="gradients of a whole forward are reduced",
    ),
)
class NeverReducesParts(ReferenceEngine):
    """Gradients of a part that was called by itself are never reduced.

    Reported: calling submodules directly went past the hooks that reduce gradients.
    """

    prepared_type = _PreparedForTheRoot


class _PreparedForWholeGroups(PreparedReference):
    def __init__(self, module: nn.Module, plan: Plan, door: Any) -> None:  # Any: as the base class says
        super().__init__(module, plan, door)
        self._has_run: set[nn.Module] = set()
        self._groups = [members(module, unit) for unit in plan.units if "," in unit]
        for group in self._groups:
            for one in group:
                one.register_forward_pre_hook(lambda m, _: self._has_run.add(m))

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for group in self._groups:
            if not self._has_run.issuperset(group):
                for parameter in (p for m in group for p in m.parameters()):
                    parameter.grad = None

    def step(self) -> None:
        super().step()
        self._has_run.clear()


@mutant(
    after="mindspore-ai/hyper-parallel#553",
    kills_on=Condition(world_size=1, steps=2, plan=_GROUPS, because="a group that runs whole is reduced"),
)
class NeverReducesGroupsRunInPart(ReferenceEngine):
    """A group of which one module did not run has no gradients.

    Reported: hooks of a list of modules that were entered one by one left the group in a state that backward did
    not expect.
    """

    prepared_type = _PreparedForWholeGroups


class _DeafUnit(UnitHandle):
    """Hears no flag."""

    def set_gradient_sync(self, *, is_on: bool) -> None:
        pass

    def set_last_backward(self, *, is_last: bool) -> None:
        pass


class _PreparedWithDeafGroups(PreparedReference):
    def units(self) -> Mapping[str, UnitHandle]:
        return {name: _DeafUnit() if "," in name else unit for name, unit in super().units().items()}


@mutant(
    after="pytorch/torchtitan#3724",
    kills_on=Condition(
        steps=2,
        microbatches=2,
        plan=Plan(
            grouping=Grouping.REQUIRED,
            units=("first,second",),
            accumulation=Accumulation.LAST_MICROBATCH,
            demands=frozenset({Capability.UNIT_SYNC}),
        ),
        because="the only microbatch is also the last; counts hold from the second step on",
    ),
    trace=Trace.COMMUNICATION,
)
class IgnoresTheFlagsOfGroups(ReferenceEngine):
    """Groups of several modules reduce in every backward although they were told not to.

    Reported: flags that a loop over chunks sets on a group were not in the state that the loop meant them to be.
    """

    prepared_type = _PreparedWithDeafGroups


@mutant(
    after="pytorch/pytorch#183702",
    kills_on=Condition(
        world_size=1,
        plan=Plan(grouping=Grouping.REQUIRED, units=("first,second",), compute_dtype=torch.bfloat16),
        because="in float32 there is nothing to cast",
    ),
    trace=Trace.CRASH,
)
class CastsTheFirstInputsAlone(ReferenceEngine):
    """Of a group's modules the first alone has its inputs cast.

    Reported: what happened when the second module of a list was entered depended on the state that the first had
    left.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, and give the others their inputs in float32 again."""
        prepared = super().prepare(model, plan, mesh)
        for unit in plan.units:
            for module in members(model, unit)[1:]:
                module.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
        return prepared


@mutant(
    after="pytorch/pytorch#109385",
    kills_on=Condition(plan=_METHODS, because="forward itself is attended to"),
    trace=Trace.CRASH,
)
class IgnoresForwardMethods(ReferenceEngine):
    """A method other than forward runs on sharded parameters.

    Reported: a method that is not forward saw sharded parameters.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, under a plan without the methods."""
        return super().prepare(model, replace(plan, forward_methods=()), mesh)


@mutant(
    after="pytorch/pytorch#123962",
    kills_on=Condition(plan=_METHODS, because="gradients by way of forward are reduced"),
)
class NeverReducesForwardMethods(ReferenceEngine):
    """Gradients of a module used through a method are never reduced.

    Reported: with another method than forward the hooks around forward did not run.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, and hold the gradients of such modules back for ever."""
        prepared = super().prepare(model, plan, mesh)
        for path, _ in plan.forward_methods:
            prepared.units()[path].set_gradient_sync(is_on=False)
        return prepared
