"""Mutants that do right by all parameters but one, or by all ranks but one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.adapters.torch_replicate import ReplicateEngine
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant


@mutant(after="pytorch/pytorch#63916", kills_on=Condition(because="one rank has nobody to synchronise with"))
class ForgetsToSynchroniseOneParameter(DistributedDataParallelEngine):
    """The last parameter is left out of every reduction.

    Reported: a buffer that forward had replaced was missing from the list that DDP had made at construction, and
    was never synchronised again. Needs a model of two parameters or more.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Tell DDP to leave the last parameter alone, then wrap honestly."""
        *_, forgotten = (name for name, _ in model.named_parameters())
        # DDP's documented way to leave a parameter out; it has neither a public name nor types.
        leave_out = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        leave_out(model, [forgotten])  # type: ignore[no-untyped-call]
        return super().prepare(model, plan, mesh)


class _PreparedFrozen(PreparedFullyShard):
    """Takes back what the optimizer does to some parameters."""

    def __init__(self, module: nn.Module, plan: Plan, frozen: Sequence[nn.Parameter]) -> None:
        super().__init__(module, plan)
        self._frozen = [_local(p) for p in frozen]

    @torch.no_grad()
    def step(self) -> None:
        kept = [tensor.clone() for tensor in self._frozen]
        super().step()
        for tensor, before in zip(self._frozen, kept, strict=True):
            tensor.copy_(before)


@mutant(after="pytorch/pytorch#149205", kills_on=Condition(world_size=1))
class NeverUpdatesOneParameter(ReplicateEngine):
    """The optimizer's update of the last parameter is lost.

    Reported: the optimizer had captured tensors that were not the model's parameters.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, then freeze the last parameter."""
        prepared = super().prepare(model, plan, mesh)
        return _PreparedFrozen(prepared.module, plan, [*prepared.named.parameters()][-1:])


@mutant(
    after="pytorch/pytorch#176076", kills_on=Condition(because="a rank that owns all rows is left in peace")
)
class NeverUpdatesTheLastRanksRows(FullyShardEngine):
    """The rows that the last rank owns keep their initial values.

    Reported: the padded shard of the last rank kept its initial rows.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then freeze what lies on the last rank of the shard axis."""
        prepared = super().prepare(model, plan, mesh)
        num_shards = mesh.size(mesh.ndim - 1)
        is_last = num_shards > 1 and mesh.get_local_rank(mesh.ndim - 1) == num_shards - 1
        return _PreparedFrozen(prepared.module, plan, [*prepared.named.parameters()] if is_last else [])


def _local(parameter: nn.Parameter) -> torch.Tensor:
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole
