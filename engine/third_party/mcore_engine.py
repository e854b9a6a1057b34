"""Megatron Core's DistributedDataParallel, which requires CUDA: worlds of a CPU use a stand-in for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import BASICS
from shardproof.engine.contract import (
    Capability,
    Engine,
    NoGradient,
    Plan,
    PreparedModel,
    Shard,
    Tuning,
    shard_of,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about optional packages
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class PreparedMegatronCore(PreparedModel):
    """Gradients accumulate in flat buffers, ``main_grad`` of each parameter, and are in ``grad`` only for the step."""

    no_gradient = NoGradient.ZEROS

    def __init__(self, module: Any, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._ddp = module

    def backward(self, loss: torch.Tensor) -> None:
        """Reduce with the last microbatch: a reduced gradient must not be reduced again."""
        with nullcontext() if self.is_last_microbatch else self._ddp.no_sync():
            super().backward(loss)
        if self.is_last_microbatch:
            self._ddp.finish_grad_sync()

    def accumulating(self) -> AbstractContextManager[None]:
        """Do nothing: `backward` checks which microbatch is the last."""
        return nullcontext()

    def step(self) -> None:
        with self._gradients():
            super().step()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        with self._gradients():
            return super().clip_grad_norm_(max_norm, norm_type)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the buffers."""
        self._ddp.zero_grad_buffer()

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read the buffers."""
        main = {name: getattr(p, "main_grad", None) for name, p in self.owned_parameters().items()}
        return {name: None if gradient is None else shard_of(gradient) for name, gradient in main.items()}

    @contextmanager
    def _gradients(self) -> Iterator[None]:
        """Put gradients where the optimizer finds them, as Megatron's own does."""
        for p in self.owned_parameters().values():
            p.grad = getattr(p, "main_grad", None)
        yield
        for p in self.owned_parameters().values():
            p.grad = None


class MegatronCoreDdpEngine(Engine):
    """Buckets are reduced during backward; if parameters are unused, after it."""

    name = "mcore.ddp"
    package = "megatron-core"
    insists_on_cuda = True
    preload = (__name__,)
    capabilities = BASICS | {Capability.OVERLAP}

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Create the groups: data parallelism has all ranks, every other kind one."""
        plan.refuse_beyond(self.capabilities)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        groups = ProcessGroupCollection(
            dp=mesh.get_group(), tp=alone, pp=alone, ep=alone, cp=alone, expt_dp=mesh.get_group()
        )
        # By default a bucket has 40 million elements, and overlaps nothing in a small model.
        bucket_bytes = 4 if plan.tuning is Tuning.OVERLAPPED else plan.bucket_bytes
        options = DistributedDataParallelConfig(
            overlap_grad_reduce=plan.tuning is not Tuning.IN_SEQUENCE
            and not plan.demands & {Capability.UNUSED, Capability.RANK_DEPENDENT},
            bucket_size=None if bucket_bytes is None else max(1, bucket_bytes // 4),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said of defaults
            config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
        return PreparedMegatronCore(
            DistributedDataParallel(config, options, model, pg_collection=groups), model
        )
