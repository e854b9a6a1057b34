"""SimpleFSDP of torchtitan: parameters are DTensors behind properties, gathered wherever they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

from shardproof.engine.contract import Capability, Engine, Layout, Plan, PreparedModel


class PreparedSimpleFsdp(PreparedModel):
    """It sums gradients over ranks and casts neither inputs nor outputs: its caller divides, and casts."""

    def __init__(self, model: nn.Module, plan: Plan, num_ranks: int) -> None:
        super().__init__(model)
        self._plan, self._num_ranks = plan, num_ranks

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: as in the contract
        """Cast what the plan wants cast."""
        inputs, named = _cast((inputs, named), self._plan.compute_dtype)
        return _cast(self.module(*inputs, **named), self._plan.output_dtype)

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self._num_ranks)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    if isinstance(value, dict):
        return {key: _cast(inner, dtype) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        cast = [_cast(inner, dtype) for inner in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _cast(getattr(value, f.name), dtype) for f in fields(value)})
    return value


class SimpleFsdpEngine(Engine):
    """`data_parallel` in each of its modes."""

    name = "torchtitan.simple_fsdp"
    package = "torchtitan"
    capabilities = frozenset(
        {
            Capability.SHARD,
            Capability.REPLICATE,
            Capability.HYBRID,
            Capability.REDUCE_DTYPE,
            Capability.COMPUTE_DTYPE,
            Capability.CLIP,
            Capability.STATE,
            Capability.UNUSED,
            Capability.PARTS,
            Capability.SUM_OF_FORWARDS,
            Capability.INTERLEAVE,
            Capability.RECOVER,
            Capability.TENSOR_PARALLEL,
        }
    )
    modes: ClassVar[Mapping[Layout, str]] = {Layout.REPLICATE: "replicate", Layout.HYBRID: "hybrid_shard"}

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Choose the mode; it has no units."""
        plan.refuse_beyond(self.capabilities)
        policy = MixedPrecisionPolicy(param_dtype=plan.compute_dtype, reduce_dtype=plan.reduction_dtype)
        mode = self.modes.get(plan.layout, "fully_shard")
        return PreparedSimpleFsdp(data_parallel(model, mesh, mode=mode, mp_policy=policy), plan, mesh.size())
