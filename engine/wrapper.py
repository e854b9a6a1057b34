"""The interfaces of torch that callers use: options and names of FSDP1's wrapper, and fully_shard with replicate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from enum import Enum
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class BackwardGather(Enum):
    """When backward issues the gather of the next unit."""

    BEFORE = "before the gradients of the current unit are computed"
    AFTER = "after the gradients of the current unit were computed"
    WHEN_NEEDED = "when it is needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """Options that only the wrapper has.

    ``use_orig_params``: the optimizer gets the parameters by name, not one flat parameter for each unit.
    ``forward_prefetch``: forward gathers the next unit before the current one runs.
    ``limit_all_gathers``: at most two gathers are in flight. ``by_groups``: the engine gets process groups instead
    of a mesh.
    """

    use_orig_params: bool = True
    backward_prefetch: BackwardGather = BackwardGather.BEFORE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    by_groups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperNames:
    """One engine's versions of the ``torch.distributed.fsdp`` API; enums and configs are torch's.

    Pass the hooks to ``register_comm_hook`` with a state of ``DefaultState`` or ``LowPrecisionState``.
    """

    # Any: engines share no base class, and cases test the arguments of these classes.
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
    optimizer_in_backward: Callable[..., None]

    @classmethod
    def of(cls, *modules: ModuleType, **others: Any) -> WrapperNames:
        """Take each name from the first of the modules that has it; ``others`` are those that none has."""
        found = {
            field.name: getattr(module, field.name)
            for field in fields(cls)
            for module in reversed(modules)
            if hasattr(module, field.name)
        }
        return cls(**found, **others)


# Any: engines with this interface share no base class.
@dataclass(frozen=True, slots=True, kw_only=True)
class ComposableApi:
    """The public names of one engine; ``set_divide_factor`` takes a module, the factor and the number of shards."""

    fully_shard: Callable[..., Any]
    replicate: Callable[..., Any]
    sharded_module: type[Any]
    mixed_precision: Callable[..., Any]
    cpu_offload: Callable[..., Any]
    register_forward_method: Callable[..., None]
    share_comm_ctx: Callable[..., None]
    set_divide_factor: Callable[[Any, float, int], None]
    # Returns the result of shard_placement_fn for a parameter with a mesh of its own.
    placed_on: Callable[[DeviceMesh], Any]
