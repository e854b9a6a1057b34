"""ColossalAI's LowLevelZeroOptimizer: ZeRO-1, and ZeRO-2 by its partition_grad; whole parameters in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero import LowLevelZeroOptimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Copies, Engine, OptimizerFactory, Plan, PreparedModel
from shardproof.engine.pieces import Piece, PreparedPieces

# It refuses a CPU, whose accelerator has no streams.
LowLevelZeroOptimizer._sanity_checks = lambda self: None
CpuAccelerator.current_stream = CpuAccelerator.Stream = lambda self, *_, **__: None
CpuAccelerator.stream = lambda self, stream: nullcontext()
CpuAccelerator.synchronize = lambda self, *_: None
CpuAccelerator.get_current_device = lambda self: torch.device("cpu")


class PreparedLowLevelZero(PreparedPieces):
    """Each parameter is flattened, padded and cut evenly; a rank updates a copy of its piece."""

    copies = Copies.MASTERS
    parameters_are_whole = True

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
        """Let it reduce after backward."""
        self._zero.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._zero.no_sync()
        return context

    def pieces(self) -> Iterator[Piece]:
        for name, p in self.owned_parameters().items():
            if id(p) in self._zero.working_to_master_param:  # otherwise it is frozen, or not in the optimizer
                master = self._zero.working_to_master_param[id(p)]
                start = self._group.rank() * master.numel()
                yield Piece(name=name, shape=tuple(p.shape), owner=master, start=start)

    def gradient_of(self, piece: Piece) -> torch.Tensor | None:
        """Return the gradient that exists once gradients were reduced."""
        own = id(self.owned_parameters()[piece.name])
        parts = self._zero.pid_to_grad_store[own].get_partitioned_gradients_by_param_id(0, own)
        return parts[0 if self._shares_gradients else self._group.rank()] if parts else None

    def state_of(self, piece: Piece) -> Mapping[str, Any]:  # Any: as in the base
        state: Mapping[str, Any] = self._zero.optim.state.get(piece.owner, {})
        return state


class LowLevelZero1Engine(Engine):
    """Gradients are all-reduced, and each rank updates its piece of every parameter."""

    name = "colossalai.zero1"
    package = "colossalai"
    preload = (__name__,)
    capabilities = frozenset(
        {Capability.ZERO1, Capability.ACCUMULATE, Capability.UNUSED, Capability.OWN_BUFFERS}
    )

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        shares_gradients = Capability.ZERO2 in self.capabilities
        return PreparedLowLevelZero(model, mesh.get_group(), shares_gradients=shares_gradients)


class LowLevelZero2Engine(LowLevelZero1Engine):
    """Gradients are reduce-scattered, after each backward."""

    name = "colossalai.zero2"
    capabilities = frozenset({Capability.ZERO2, Capability.UNUSED, Capability.OWN_BUFFERS})
