"""Mutants that lose what a module's second run, or a second forward, adds to the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.capability import Capability
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant


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

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        self.first_uses.begin()
        return super().__call__(*inputs, **named)


@mutant(
    after="NVIDIA/Megatron-LM#7166",
    kills_on=Condition(world_size=1, because="a parameter that is used once loses nothing"),
)
class CountsTheFirstUseAlone(ReferenceEngine):
    """Of several uses of a parameter in one iteration the first alone has a gradient.

    Reported: the window for a parameter's gradient closed after the first of two contributions.
    """

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

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        self._latest += 1
        this = self._latest
        output = super().__call__(*inputs, **named)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient if this == self._latest else 0 * gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output


@mutant(
    after="pytorch/pytorch#136861",
    kills_on=Condition(
        world_size=1,
        microbatches=2,
        plan=Plan(demands=frozenset({Capability.INTERLEAVE})),
        because="a forward whose backward comes at once is the last",
    ),
)
class ForgetsEarlierForwards(ReferenceEngine):
    """Of several forwards that wait for backward the last alone has gradients.

    Reported: a second forward before the backward of the first took over the state that the first one's backward
    needed.
    """

    prepared_type = _PreparedForgettingForwards
