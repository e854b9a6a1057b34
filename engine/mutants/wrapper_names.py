"""Names of FSDP1 behind which stands something else: what mutants of its interface are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from engine.adapters.torch_fsdp1 import NAMES
from engine.contract import WrapperNames

__all__ = ["Options", "leaving_out", "swapping", "with_options", "with_strategies"]

Options = Mapping[str, Any]  # Any: arguments of the wrapper


def with_options(change: Callable[[nn.Module, Options], Options]) -> WrapperNames:
    """Give names whose wrapper has other options than those that it was given; its units have what the root has."""

    class Changed(FullyShardedDataParallel):
        # Any: arguments of the wrapper.
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **change(module, options))

    return replace(NAMES, FullyShardedDataParallel=Changed)


def leaving_out(*names: str) -> WrapperNames:
    """Give names whose wrapper forgets these options."""
    return with_options(lambda module, options: {k: v for k, v in options.items() if k not in names})


# Any: values of the option.
def swapping(name: str, values: Mapping[Any, Any]) -> WrapperNames:
    """Give names whose wrapper takes one value of an option for another."""
    return with_options(
        lambda module, options: {k: values.get(v, v) if k == name else v for k, v in options.items()}
    )


def with_strategies(values: Mapping[ShardingStrategy, ShardingStrategy]) -> WrapperNames:
    """Give names whose wrapper takes one strategy for another; FULL_SHARD is that of who names none."""

    def change(module: nn.Module, options: Options) -> Options:
        asked = options.get("sharding_strategy") or ShardingStrategy.FULL_SHARD
        return {**options, "sharding_strategy": values.get(asked, asked)}

    return with_options(change)
