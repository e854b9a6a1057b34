"""Mutants with faults in how modules and parameters are used: in part, several times, or shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.composable import members
from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import (
    Plan,
    PreparedModel,
    Shard,
    UnitHandle,
)
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import changing


@mutant(after="NVIDIA/Megatron-LM#6693", phase="reduce")
class NeverReducesParts(ReferenceEngine):
    """Gradients of a part that was called directly are never reduced."""

    class Prepared(PreparedReference):
        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            self._set_gradient_sync(is_on=True)
            return super().__call__(*inputs, **named)

        def part(self, name: str) -> nn.Module:
            self._set_gradient_sync(is_on=False)
            return super().part(name)


@mutant(after="mindspore-ai/hyper-parallel#553", phase="reduce")
class NeverReducesGroupsRunInPart(ReferenceEngine):
    """A group in which one module did not run has no gradients."""

    class Prepared(PreparedReference):
        def __init__(self, module: nn.Module, plan: Plan, api: Any) -> None:  # Any: as the base class says
            super().__init__(module, plan, api)
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


@mutant(after="pytorch/torchtitan#3724", trace=Trace.COMMUNICATION)
class IgnoresTheFlagsOfGroups(ReferenceEngine):
    """Groups of several modules reduce in every backward although their flags are off."""

    class Prepared(PreparedReference):
        def units(self) -> Mapping[str, UnitHandle]:
            return {name: _FlaglessUnit() if "," in name else unit for name, unit in super().units().items()}


class _FlaglessUnit(UnitHandle):
    """Ignores the flag."""

    def set_gradient_sync(self, *, is_on: bool) -> None:
        pass

    def set_last_backward(self, *, is_last: bool) -> None:
        pass


@mutant(after="pytorch/pytorch#183702", trace=Trace.CRASH)
class CastsTheFirstInputsAlone(ReferenceEngine):
    """Of a group's modules only the first has its inputs cast."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for unit in plan.units:
            for module in members(model, unit)[1:]:
                module.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
        return prepared


@mutant(after="pytorch/pytorch#109385", trace=Trace.CRASH)
class IgnoresForwardMethods(ReferenceEngine):
    """A method other than forward runs on sharded parameters."""

    misreads = changing(forward_methods=())


@mutant(after="pytorch/pytorch#123962", phase="reduce")
class NeverReducesForwardMethods(ReferenceEngine):
    """Gradients of a module used through a method are never reduced."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for path, _ in plan.forward_methods:
            prepared.units()[path].set_gradient_sync(is_on=False)
        return prepared


class _FirstUses:
    """Makes parameters require no gradient in all uses but the first since the last `begin`."""

    def __init__(self, model: nn.Module) -> None:
        self._used: set[int] = set()
        for module in model.modules():
            # Tied parameters count as one, of which only the identity is kept: it is about to be replaced.
            owned = {n: id(p) for n, p in module.named_parameters(recurse=False)}
            if owned:
                self._watch(module, owned)

    def begin(self) -> None:
        """Count from here."""
        self._used.clear()

    def _watch(self, module: nn.Module, owned: dict[str, int]) -> None:
        late: list[nn.Parameter] = []

        # Any: a module's inputs and outputs are of any type.
        def enter(_: nn.Module, inputs: Any) -> None:
            late.extend(getattr(module, name) for name, key in owned.items() if key in self._used)
            self._used.update(owned.values())
            for parameter in late:
                parameter.requires_grad_(False)

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            for parameter in late:
                parameter.requires_grad_(True)
            late.clear()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


@mutant(after="NVIDIA/Megatron-LM#7166", phase="backward")
class CountsTheFirstUseAlone(ReferenceEngine):
    """Of several uses of a parameter in one iteration only the first has a gradient."""

    class Prepared(PreparedReference):
        first_uses: _FirstUses

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
            self.first_uses.begin()
            return super().__call__(*inputs, **named)

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        first_uses = _FirstUses(model)
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, self.Prepared)
        prepared.first_uses = first_uses
        return prepared


@mutant(after="pytorch/pytorch#136861", phase="backward")
class ForgetsEarlierForwards(ReferenceEngine):
    """Of several forwards before backward only the last has gradients."""

    class Prepared(PreparedReference):
        _latest = 0

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
            self._latest += 1
            this = self._latest
            output = super().__call__(*inputs, **named)
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: gradient if this == self._latest else 0 * gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return output


@mutant(after="deepspeedai/DeepSpeed#6662", trace=Trace.CRASH)
class RefusesBackwardInEvaluation(ReferenceEngine):
    """Backward through a module raises while the module is in evaluation mode."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        for module in model.modules():
            module.register_forward_hook(_refuse)
        return super().prepare(model, plan, mesh)


def _refuse(module: nn.Module, _: Any, output: Any) -> None:  # Any: as a module's inputs and outputs are
    def arrive(_: torch.Tensor) -> None:
        if not module.training:
            raise AssertionError("expected a module in training mode")

    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(arrive)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@mutant(after="verl-project/verl#7834", phase="prepare")
class UntiesSharedParameters(ReferenceEngine):
    """Each use of a tied parameter gets a copy of its own."""

    class Prepared(PreparedReference):
        """Hides the copies from reads."""

        _copied: frozenset[str] = frozenset()

        def local_parameters(self) -> Mapping[str, Shard]:
            return {n: s for n, s in super().local_parameters().items() if n not in self._copied}

        def local_gradients(self) -> Mapping[str, Shard | None]:
            return {n: s for n, s in super().local_gradients().items() if n not in self._copied}

        def local_optimizer_state(self) -> Mapping[str, Shard]:
            state = super().local_optimizer_state()
            return {n: s for n, s in state.items() if n.rpartition("/")[0] not in self._copied}

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        copied = frozenset(name for _, *others in _ties(model) for name in others)
        for name in copied:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(model.get_parameter(name).detach().clone()))
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, self.Prepared)
        prepared._copied = copied
        return prepared


@mutant(after="pytorch/pytorch#176225", trace=Trace.CRASH)
class TellsParametersApartByName(FullyShardEngine):
    """A second model is taken for the first."""

    def __init__(self) -> None:
        self._known: set[tuple[str, torch.Size]] = set()

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        for name, parameter in model.named_parameters():
            key = (name, parameter.shape)
            if key in self._known:
                raise ValueError(f"parameter {name!r} is managed by another group already")
            self._known.add(key)
        return super().prepare(model, plan, mesh)


@mutant(after="huggingface/accelerate#4171", trace=Trace.CRASH)
class SplitsTiedModules(ReferenceEngine):
    """Modules of one group that share a parameter become separate groups."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
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


@mutant(after="modelscope/ms-swift#10157", phase="backward")
class MistakesViewsOfOneStorage(ReferenceEngine):
    """Of views of one tensor that a forward saves, all have the values of the first."""

    class Prepared(PreparedReference):
        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            first: dict[object, torch.Tensor] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                if (base := tensor._base) is None or base.is_leaf:  # such as a view of a weight
                    return tensor
                return first.setdefault((base.data_ptr(), tensor.shape), tensor)

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                return super().__call__(*inputs, **named)
