"""Mutants that overlook what a caller does to parameters and gradients amid training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.adapters.torch_replicate import ReplicateEngine
from shardproof.engine.contract import Capability
from shardproof.engine.mutants.mutant import Condition, mutant
from shardproof.engine.mutants.plans import demanding

_HOOKS = Condition(world_size=1, plan=demanding(Capability.GRADIENT_HOOKS))


class _HooksByHand(PreparedFullyShard):
    """Takes the hooks of all parameters away for a backward."""

    # Any: torch has no public name for a parameter's hooks.
    def taken(self) -> list[tuple[Any, Any]]:
        """Return each parameter with the hooks that it had."""
        held: list[tuple[Any, Any]] = [
            (p, p._post_accumulate_grad_hooks) for p in self.owned_parameters().values()
        ]
        for parameter, _ in held:
            parameter._post_accumulate_grad_hooks = None
        return held


@mutant(after="pytorch/pytorch#129450", kills_on=_HOOKS)
class NeverCallsGradientHooks(FullyShardEngine):
    """Hooks on parameters are never called.

    Reported: the parameters that a caller sees take no part in autograd, so hooks that wait for their gradients
    never ran.
    """

    class Prepared(_HooksByHand):
        def backward(self, loss: torch.Tensor) -> None:
            held = self.taken()
            super().backward(loss)
            for parameter, hooks in held:
                parameter._post_accumulate_grad_hooks = hooks


@mutant(after="pytorch/pytorch#110903", kills_on=Condition(plan=demanding(Capability.GRADIENT_HOOKS)))
class CallsGradientHooksBeforeReducing(FullyShardEngine):
    """Hooks on parameters see this rank's own gradient, half of what is reduced.

    Reported: a hook for reductions ran before the gradient that a hook of the caller's was to see was complete.
    """

    class Prepared(_HooksByHand):
        def backward(self, loss: torch.Tensor) -> None:
            held = self.taken()
            super().backward(loss)
            for parameter, hooks in held:
                parameter._post_accumulate_grad_hooks = hooks
                for hook in (hooks or {}).values():
                    if parameter.grad is not None:
                        whole = parameter.grad
                        parameter.grad = whole * 0.5
                        hook(parameter)
                        parameter.grad = whole


@mutant(
    after="facebookresearch/fairscale#605",
    kills_on=Condition(world_size=1, microbatches=2, plan=demanding(Capability.EDIT_GRADIENTS)),
)
class AddsToItsOwnGradients(ReplicateEngine):
    """Gradients are added up in the engine's own copies, which overrule those that the caller has edited.

    Reported: gradients that a training loop had cleared for some weights took part in the step.
    """

    class Prepared(PreparedFullyShard):
        _own: dict[nn.Parameter, torch.Tensor] | None = None

        def backward(self, loss: torch.Tensor) -> None:
            for parameter, gradient in (self._own or {}).items():
                parameter.grad = gradient.clone()
            super().backward(loss)
            self._own = {p: p.grad.clone() for p in self.owned_parameters().values() if p.grad is not None}

        def zero_grad(self, *, set_to_none: bool) -> None:
            super().zero_grad(set_to_none=set_to_none)
            self._own = None
