"""Two engines with one interface: torch's composable FSDP2 and our reference, name for name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate

from shardproof.engine import reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposableApi:
    """The public names of one engine; ``Any`` because the two engines share no base class."""

    name: str
    fully_shard: Callable[..., Any]
    replicate: Callable[..., Any]
    sharded_module: type[Any]
    unshard_handle: type[Any]
    mixed_precision: Callable[..., Any]
    cpu_offload: Callable[..., Any]
    register_forward_method: Callable[..., None]
    share_comm_ctx: Callable[..., None]


TORCH = ComposableApi(
    name="torch",
    fully_shard=torch_fsdp.fully_shard,
    replicate=torch_replicate,
    sharded_module=torch_fsdp.FSDPModule,
    unshard_handle=torch_fsdp.UnshardHandle,
    mixed_precision=torch_fsdp.MixedPrecisionPolicy,
    cpu_offload=torch_fsdp.CPUOffloadPolicy,
    register_forward_method=torch_fsdp.register_fsdp_forward_method,
    share_comm_ctx=torch_fsdp.share_comm_ctx,
)
REFERENCE = ComposableApi(
    name="reference",
    fully_shard=reference.fully_shard,
    replicate=reference.replicate,
    sharded_module=reference.FSDPModule,
    unshard_handle=reference.UnshardHandle,
    mixed_precision=reference.MixedPrecisionPolicy,
    cpu_offload=reference.CPUOffloadPolicy,
    register_forward_method=reference.register_fsdp_forward_method,
    share_comm_ctx=reference.share_comm_ctx,
)
BY_NAME = {api.name: api for api in (TORCH, REFERENCE)}
each_api = pytest.mark.parametrize("api", sorted(BY_NAME))
