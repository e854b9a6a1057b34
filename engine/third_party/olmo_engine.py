"""OLMo-core's MultiGroupDistributedDataParallel: gradients are in flat buckets, each reduced once it is full."""

from __future__ import annotations

from typing import Any

import torch
from olmo_core.nn.parallel import MultiGroupDistributedDataParallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import BASICS
from shardproof.engine.contract import Engine, NoGradient, Plan, PreparedModel


class PreparedMultiGroup(PreparedModel):
    """The caller waits for reductions after the backward that starts them."""

    no_gradient = NoGradient.ZEROS

    def __init__(self, module: Any, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._ddp = module

    def backward(self, loss: torch.Tensor) -> None:
        """Wait as the wrapper requires, unless gradients accumulate."""
        super().backward(loss)
        if self._ddp.require_backward_grad_sync:
            self._ddp.finalize_grad_reduce()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Let the wrapper clear its buckets, which contain the gradients."""
        self._ddp.zero_grad(set_to_none=set_to_none)


class MultiGroupDdpEngine(Engine):
    """All parameters are in one group."""

    name = "olmo.ddp"
    package = "ai2-olmo-core"
    preload = (__name__,)
    capabilities = BASICS

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap it; all ranks already have the first one's values."""
        plan.refuse_beyond(self.capabilities)
        bucket_mb = None if plan.bucket_bytes is None else plan.bucket_bytes / 2**20
        wrapper = MultiGroupDistributedDataParallel(
            model, process_group=mesh.get_group(), bucket_cap_mb=bucket_mb
        )
        return PreparedMultiGroup(wrapper, model)
