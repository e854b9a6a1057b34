"""Mutants that treat what forward is called with in their own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Layout


def _detach_nested(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(t.detach() for t in x) if isinstance(x, tuple) else x for x in inputs)


@mutant(
    after="facebookresearch/fairscale#1191",
    kills_on=Condition(world_size=1, because="inputs in a row keep theirs, and data have none"),
)
class DetachesNestedInputs(ReferenceEngine):
    """Tensors in a tuple reach a unit without their history.

    Reported: inputs were converted where gradients were off, and lost theirs.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, then put a hook before each unit."""
        prepared = super().prepare(model, plan, mesh)
        for unit in plan.units:
            model.get_submodule(unit).register_forward_pre_hook(_detach_nested)
        return prepared


def _halve_nothing_nested(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give nested tensors back in the dtype of the model, whatever the one to compute in."""
    return tuple(tuple(t.float() for t in x) if isinstance(x, tuple) else x for x in inputs)


@mutant(
    after="pytorch/pytorch#91078",
    kills_on=Condition(
        world_size=1,
        plan=Plan(layout=Layout.SHARD, compute_dtype=torch.bfloat16),
        because="in the parameters' own dtype there is nothing to convert",
    ),
    trace=Trace.CRASH,
)
class CastsOuterInputsAlone(FullyShardEngine):
    """Tensors in a tuple are not converted to the dtype to compute in.

    Reported: inputs were prepared by their place, which was another where inputs are nested.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then undo after the engine's own hook."""
        prepared = super().prepare(model, plan, mesh)
        if plan.compute_dtype is not None:
            for unit in plan.units:
                model.get_submodule(unit).register_forward_pre_hook(_halve_nothing_nested)
        return prepared


class _PreparedBlind(PreparedReference):
    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        self._set_gradient_sync(is_on=bool(inputs))
        return super().__call__(*inputs, **named)


@mutant(
    after="pytorch/pytorch#129259",
    kills_on=Condition(because="a model whose forward takes inputs trains like any other"),
)
class ReducesOnlyAfterInputs(ReferenceEngine):
    """A forward without arguments is followed by no reduction.

    Reported: that a unit's backward was over was told by the gradients of its inputs.
    """

    prepared_type = _PreparedBlind
