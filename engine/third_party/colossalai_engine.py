"""ColossalAI's LowLevelZeroOptimizer: ZeRO-1, and ZeRO-2 by its partition_grad; whole parameters in float32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero import LowLevelZeroOptimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import (
    Capability,
    Engine,
    Masters,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Shard,
    shard_of,
)

# It refuses a CPU, whose accelerator has no streams.
LowLevelZeroOptimizer._sanity_checks = lambda self: None
CpuAccelerator.current_stream = CpuAccelerator.Stream = lambda self, *_, **__: None
CpuAccelerator.stream = lambda self, stream: nullcontext()
CpuAccelerator.synchronize = lambda self, *_: None
CpuAccelerator.get_current_device = lambda self: torch.device("cpu")


class PreparedLowLevelZero(PreparedModel):
    """Each parameter is flattened, padded and cut evenly; a rank updates a copy of its piece."""

    masters = Masters.SHARE

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, shares_gradients: bool) -> None:
        super().__init__(model)
        self._group, self._shares_gradients = group, shares_gradients

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Wrap it; a scale other than 1 is for float16."""
        if len({p.dtype for p in self.named.parameters()}) > 1:
            raise ValueError("expected parameters of one dtype, as does the check that is left out above")
        self._zero: Any = LowLevelZeroOptimizer(
            factory(self.named.parameters()),
            dp_process_group=self._group,
            initial_scale=1,
            partition_grad=self._shares_gradients,
        )
        super().optimizer(lambda _: self._zero)

    def backward(self, loss: torch.Tensor) -> None:
        """Let it reduce afterwards."""
        self._zero.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._zero.no_sync()
        return context

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read this rank's pieces, which are there once gradients were reduced."""
        return {name: self._gradient(p) for name, p in self.owned_parameters().items()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read the state of this rank's pieces."""
        masters = self._zero.working_to_master_param
        return {
            f"{name}/{key}": self._piece(p, value) if value.dim() else shard_of(value)
            for name, p in self.owned_parameters().items()
            if id(p) in masters
            for key, value in self._zero.optim.state.get(masters[id(p)], {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _gradient(self, p: nn.Parameter) -> Shard | None:
        if id(p) not in self._zero.pid_to_grad_store:  # frozen, or not the optimizer's
            return None
        pieces = self._zero.pid_to_grad_store[id(p)].get_partitioned_gradients_by_param_id(0, id(p))
        mine = 0 if self._shares_gradients else self._group.rank()
        return self._piece(p, pieces[mine]) if pieces else None

    def _piece(self, p: nn.Parameter, padded: torch.Tensor) -> Shard:
        start = min(self._group.rank() * padded.numel(), p.numel())
        return Shard.flat(padded.detach().flatten()[: p.numel() - start].clone(), start, tuple(p.shape))


class LowLevelZero1Engine(Engine):
    """Gradients are all-reduced, and each rank updates its piece of every parameter."""

    name = "colossalai.zero1"
    preload = (__name__,)
    capabilities = frozenset(
        {Capability.ZERO1, Capability.ACCUMULATE, Capability.UNUSED, Capability.OWN_BUFFERS}
    )

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        shares_gradients = Capability.ZERO2 in self.capabilities
        return PreparedLowLevelZero(model, mesh.get_group(), shares_gradients=shares_gradients)

    def version(self) -> str:
        """Name ColossalAI's release."""
        return f"colossalai {version('colossalai')}"


class LowLevelZero2Engine(LowLevelZero1Engine):
    """Gradients are reduce-scattered, after each backward."""

    name = "colossalai.zero2"
    capabilities = frozenset({Capability.ZERO2, Capability.UNUSED, Capability.OWN_BUFFERS})
