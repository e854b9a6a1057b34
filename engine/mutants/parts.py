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
from engine.contract import Plan, PreparedModel, UnitHandle

__all__ = [
    "CastsTheFirstInputsAlone",
    "IgnoresForwardMethods",
    "IgnoresTheFlagsOfGroups",
    "NeverReducesForwardMethods",
    "NeverReducesGroupsRunInPart",
    "NeverReducesParts",
]


class _PreparedForTheRoot(PreparedReference):
    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        self._set_gradient_sync(is_on=True)
        return super().__call__(*inputs)

    def part(self, name: str) -> nn.Module:
        self._set_gradient_sync(is_on=False)
        return super().part(name)


class NeverReducesParts(ReferenceEngine):
    """The backward of a part that was called by itself leaves its gradients where they are.

    After NVIDIA/Megatron-LM#6693: calling submodules directly went past the hooks that reduce gradients.
    """

    name = "mutant.NeverReducesParts"
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


class NeverReducesGroupsRunInPart(ReferenceEngine):
    """A group of several modules, one of which does not run in a step, has no gradients in that step.

    After mindspore-ai/hyper-parallel#553: hooks of a list of modules that were entered one by one left the
    group in a state that backward did not expect.
    """

    name = "mutant.NeverReducesGroupsRunInPart"
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


class IgnoresTheFlagsOfGroups(ReferenceEngine):
    """Groups of several modules reduce in every backward, whatever they are told; the numbers are right.

    After pytorch/torchtitan#3724: flags that a loop over chunks sets on a group were not in the state that the
    loop meant them to be.
    """

    name = "mutant.IgnoresTheFlagsOfGroups"
    prepared_type = _PreparedWithDeafGroups


class CastsTheFirstInputsAlone(ReferenceEngine):
    """Of a group of several modules the first alone has its inputs cast to the dtype that computes.

    After pytorch/pytorch#183702: what happened when the second module of a list was entered depended on the
    state that the first had left.
    """

    name = "mutant.CastsTheFirstInputsAlone"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, and give the others their inputs in float32 again."""
        prepared = super().prepare(model, plan, mesh)
        for unit in plan.units:
            for module in members(model, unit)[1:]:
                module.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
        return prepared


class IgnoresForwardMethods(ReferenceEngine):
    """Methods other than forward run on whatever the module holds at the time.

    After pytorch/pytorch#109385: a method that is not forward saw sharded parameters.
    """

    name = "mutant.IgnoresForwardMethods"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, under a plan without the methods."""
        return super().prepare(model, replace(plan, forward_methods=()), mesh)


class NeverReducesForwardMethods(ReferenceEngine):
    """A module used through a method is gathered for it, and its gradients are never reduced.

    After pytorch/pytorch#123962: with another method than forward the hooks around forward did not run.
    """

    name = "mutant.NeverReducesForwardMethods"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, and hold the gradients of such modules back for ever."""
        prepared = super().prepare(model, plan, mesh)
        for path, _ in plan.forward_methods:
            prepared.units()[path].set_gradient_sync(is_on=False)
        return prepared
