"""Mutants that lose what a module's second run, or a second forward, adds to the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.contract import Plan, PreparedModel

__all__ = ["CountsTheFirstUseAlone", "ForgetsEarlierForwards"]


class _FirstUses:
    """Has parameters require no gradient in all uses but the first since it was last told to begin."""

    def __init__(self, model: nn.Module) -> None:
        self._used: set[int] = set()
        for module in model.modules():
            # Of tied parameters there is one, whose identity is all that is kept: it is about to be replaced.
            owned = {n: id(p) for n, p in module.named_parameters(recurse=False)}
            if owned:
                self._watch(module, owned)

    def begin(self) -> None:
        """Count from here."""
        self._used.clear()

    def _watch(self, module: nn.Module, owned: dict[str, int]) -> None:
        late: list[nn.Parameter] = []

        # Any: a module takes and returns what it likes.
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


class _PreparedWithFirstUses(PreparedReference):
    first_uses: _FirstUses

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        self.first_uses.begin()
        return super().__call__(*inputs)


class CountsTheFirstUseAlone(ReferenceEngine):
    """Of a parameter that is used several times in an iteration only the first use has a gradient.

    After NVIDIA/Megatron-LM#7166: the window for a parameter's gradient closed after the first of two
    contributions.
    """

    name = "mutant.CountsTheFirstUseAlone"
    prepared_type = _PreparedWithFirstUses

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Watch all modules, then prepare honestly: hooks of the engine come first, whatever the order."""
        plan.refuse_beyond(self.capabilities)
        first_uses = _FirstUses(model)
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, _PreparedWithFirstUses)
        prepared.first_uses = first_uses
        return prepared


class _PreparedForgettingForwards(PreparedReference):
    _latest = 0

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        self._latest += 1
        this = self._latest
        output = super().__call__(*inputs)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient if this == self._latest else 0 * gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output


class ForgetsEarlierForwards(ReferenceEngine):
    """Where several forwards wait for their backwards, only the last one has gradients.

    After pytorch/pytorch#136861: a second forward before the backward of the first took over the state that
    the first one's backward needed.
    """

    name = "mutant.ForgetsEarlierForwards"
    prepared_type = _PreparedForgettingForwards
