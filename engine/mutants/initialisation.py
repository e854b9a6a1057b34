"""Mutants whose ranks do not all begin with the model that they were given."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.contract import Layout, Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant


@mutant(after="EvolvingLMMs-Lab/lmms-engine#185", kills_on=Condition(because="the first rank is honest"))
class ForgetsUnsavedBuffers(FullyShardEngine):
    """Buffers that no state dict holds are empty on all ranks but the first.

    Reported: made on the meta device, then emptied, rotary buffers held whatever was in memory on every rank that
    had not read the checkpoint.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Zero them, since zeros are what fresh memory mostly holds; then shard honestly."""
        if torch.distributed.get_rank() > 0:
            saved = model.state_dict().keys()
            for name, buffer in model.named_buffers():
                if name not in saved:
                    buffer.zero_()
        return super().prepare(model, plan, mesh)


@mutant(
    after="allenai/OLMo-core#319",
    kills_on=Condition(plan=Plan(layout=Layout.HYBRID), because="other layouts have no replicas"),
)
class StartsReplicasApart(FullyShardEngine):
    """Each replica draws initial weights of its own.

    Reported: seeds differed between ranks, and sharding broadcasts nothing.
    """

    @torch.no_grad()
    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Draw anew on all replicas but the first, then shard honestly."""
        replica = mesh["replicate"].get_local_rank() if plan.layout is Layout.HYBRID else 0
        if replica:
            generator = torch.Generator().manual_seed(replica)
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5, generator=generator)
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#105840", kills_on=Condition(because="the first rank is honest"))
class StartsOtherRanksAnew(FullyShardEngine):
    """All ranks but the first draw initial weights of their own.

    Reported: ranks that had made the model on the meta device initialised it themselves, and the weights that the
    first rank had read were not what training began with.
    """

    @torch.no_grad()
    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Draw anew on all ranks but the first, then shard honestly."""
        rank = torch.distributed.get_rank()
        if rank:
            generator = torch.Generator().manual_seed(rank)
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5, generator=generator)
        return super().prepare(model, plan, mesh)
