"""Mutants that ignore a caller's changes of parameters and gradients during training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.adapters.torch_replicate import ReplicateEngine
from shardproof.engine.contract import OptimizerFactory, PreparedModel
from shardproof.engine.mutants.fsdp2_insides import reference_groups
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import changing, local, unchanged


@mutant(after="pytorch/pytorch#129450", phase="reduce")
class NeverCallsGradientHooks(FullyShardEngine):
    """Hooks on parameters are never called."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            """Remove the hooks of all parameters during a backward."""
            # Any: torch has no public name for a parameter's hooks.
            held: list[tuple[Any, Any]] = [
                (p, p._post_accumulate_grad_hooks) for p in self.owned_parameters().values()
            ]
            for parameter, _ in held:
                parameter._post_accumulate_grad_hooks = None
            super().backward(loss)
            for parameter, hooks in held:
                parameter._post_accumulate_grad_hooks = hooks


@mutant(after="pytorch/pytorch#76464", phase="reduce")
class CallsGradientHooksBeforeReducing(FullyShardEngine):
    """Hooks on parameters receive this rank's own gradient, half of the reduced one."""

    class Prepared(NeverCallsGradientHooks.Prepared):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self.owned_parameters().values():
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    if parameter.grad is not None:
                        whole = parameter.grad
                        parameter.grad = whole * 0.5
                        hook(parameter)
                        parameter.grad = whole


def _undoing_loads(prepared: PreparedModel) -> PreparedModel:
    module = prepared.module
    honest = module.load_state_dict

    def load(*args: Any, **kwargs: Any) -> Any:
        with unchanged(map(local, prepared.owned_parameters().values())):
            return honest(*args, **kwargs)

    module.load_state_dict = load  # type: ignore[method-assign]  # of this one
    return prepared


@mutant(after="deepspeedai/DeepSpeed#762", phase="state loaded")
class UndoesALoad(FullyShardEngine):
    """Weights that the caller loads into the module are those from before again."""

    spoil = _undoing_loads


@mutant(after="facebookresearch/fairscale#605", phase="hold")
class AddsToItsOwnGradients(ReplicateEngine):
    """Gradients accumulate in the engine's own copies, which overwrite the caller's edits."""

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


@mutant(after="pytorch/pytorch#104148", phase="step")
class SettlesForEverWhatIsFrozen(ReferenceEngine):
    """Parameters that were trainable when the model was prepared are trained, even if they are frozen later."""

    class Prepared(PreparedReference):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            for parameter in self.owned_parameters().values():
                parameter.requires_grad_()
            return super().__call__(*inputs, **named)


@mutant(after="luxonis/luxonis-train#358", phase="step")
class NeverUpdatesWhatThawed(ReferenceEngine):
    """Parameters that were frozen when the optimizer was built are never updated."""

    class Prepared(PreparedReference):
        def optimizer(self, factory: OptimizerFactory) -> None:
            super().optimizer(factory)
            self._frozen = [p for p in self.owned_parameters().values() if not p.requires_grad]

        def step(self) -> None:
            with unchanged(self._frozen):
                super().step()


@mutant(after="pytorch/pytorch#105371", trace=Trace.COMMUNICATION)
class ReducesWhatIsFrozen(FullyShardEngine):
    """Units that were frozen after preparation are reduced, and their gradients discarded."""

    class Prepared(PreparedFullyShard):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            self._frozen = [p for p in self.owned_parameters().values() if not p.requires_grad]
            for parameter in self._frozen:
                parameter.requires_grad_()
            return super().__call__(*inputs, **named)

        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self._frozen:
                parameter.requires_grad_(False)
                parameter.grad = None


@mutant(after="pytorch/pytorch#186998", trace=Trace.COMMUNICATION)
class ForgetsTheDtypesOfWhatWasFrozen(ReferenceEngine):
    """A unit that is frozen in the first forward is reduced in the compute dtype once it trains."""

    class Prepared(PreparedReference):
        _has_run = False

        def __call__(self, *inputs: Any, **named: Any) -> Any:
            for group in [] if self._has_run else reference_groups(self):
                if not any(held.sharded_param.requires_grad for held in group.parameters):
                    computed = group._dtypes.param_dtype
                    group._dtypes = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=computed)
            self._has_run = True
            return super().__call__(*inputs, **named)


def drop_what_waits(prepared: PreparedModel) -> None:
    """Drop gradients that wait for their reduction."""
    for group in reference_groups(prepared):
        for held in group.parameters:
            held.drop_unsharded_grad()


@mutant(after="huggingface/accelerate#3394", phase="step")
class OptimizesWhatItConverted(ReplicateEngine):
    """The optimizer continues with the parameters from before a conversion."""

    class Prepared(PreparedFullyShard):
        def convert(self, dtype: torch.dtype) -> None:
            super().convert(dtype)
            for group in self.built_optimizer().param_groups:
                group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


@mutant(after="instructlab/training#414", phase="hold")
class ConvertsWithoutGradients(ReferenceEngine):
    """A conversion drops existing gradients."""

    class Prepared(PreparedReference):
        def convert(self, dtype: torch.dtype) -> None:
            super().convert(dtype)
            for parameter in self.owned_parameters().values():
                parameter.grad = None
            drop_what_waits(self)


@mutant(after="pytorch/pytorch#143277", trace=Trace.COMMUNICATION)
class ForgetsTheReduceDtypeOnceConverted(ReferenceEngine):
    """A model that is converted is reduced in its new dtype, whatever the reduce dtype is."""

    misreads = changing(reduce_dtype=None)


@mutant(after="facebookresearch/fairscale#354", phase="hold")
class ClearsWhatWaits(ReferenceEngine):
    """Gradients that wait for their reduction are dropped when the caller clears those of the model."""

    class Prepared(PreparedReference):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            if all(parameter.grad is None for parameter in self.module.parameters()):
                drop_what_waits(self)
            return super().__call__(*inputs, **named)
