"""The interface of ``FullyShardedDataParallel``: what a plan may choose of it, and its names in an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn


class BackwardGather(Enum):
    """When backward issues the gather of the unit that comes next."""

    BEFORE = "before the gradients of the current unit are computed"
    AFTER = "after the gradients of the current unit were computed"
    WHEN_NEEDED = "when it is needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """Options of the wrapper that no other interface has.

    ``use_orig_params``: the optimizer is given the parameters by name, not one flat one for each unit.
    ``forward_prefetch``: forward gathers the next unit before the current one runs.
    ``limit_all_gathers``: no more than two gathers are in flight. ``by_groups``: the engine is given process groups
    and not a mesh.
    """

    use_orig_params: bool = True
    backward_prefetch: BackwardGather = BackwardGather.BEFORE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    by_groups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperNames:
    """One engine's own things behind the names of ``torch.distributed.fsdp``; enums and configs are torch's.

    The hooks are to be passed to ``register_comm_hook`` with a state of ``DefaultState`` or ``LowPrecisionState``.
    """

    # Any: engines share no base class, and these classes' arguments are what is put to the test.
    FullyShardedDataParallel: Any
    FlatParameter: Any
    ShardedGradScaler: Any
    ModuleWrapPolicy: Any
    CustomPolicy: Any
    always_wrap_policy: Callable[..., bool]
    lambda_auto_wrap_policy: Callable[..., bool]
    size_based_auto_wrap_policy: Callable[..., bool]
    transformer_auto_wrap_policy: Callable[..., bool]
    enable_wrap: Callable[..., AbstractContextManager[None]]
    wrap: Callable[..., nn.Module]
    DefaultState: Any
    LowPrecisionState: Any
    allreduce_hook: Callable[..., Any]
    reduce_scatter_hook: Callable[..., Any]
    fp16_compress_hook: Callable[..., Any]
    bf16_compress_hook: Callable[..., Any]
