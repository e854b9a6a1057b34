"""What mutants share: changed methods of one object, kept memory, and other names of FSDP1; no engine here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from engine.adapters.composable import PreparedComposable
from engine.adapters.reference import PreparedReference
from engine.adapters.torch_fsdp1 import NAMES
from engine.adapters.torch_fsdp2 import PreparedFullyShard
from engine.contract import PreparedModel, WrapperNames

# Any, throughout: the holders are insides of engines, which have no public types.


def after(holder: Any, method: str, sin: Callable[[Any], None]) -> None:
    """Have ``sin`` done to the holder after each call of its method."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        sin(holder)
        return result

    setattr(holder, method, both)


def before(holder: Any, method: str, sin: Callable[[Any], None]) -> None:
    """Have ``sin`` done to the holder before each call of its method."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        sin(holder)
        return honest(*args, **kwargs)

    setattr(holder, method, both)


# Any, throughout: FSDP2's insides have no public types.


class Keeping(PreparedComposable):
    """Has a place for what it should let go; empty again once the optimizer has stepped, unless it grows."""

    grows = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Any] = []

    def step(self) -> None:
        """Update the parameters, then let go."""
        super().step()
        if not self.grows:
            self.kept.clear()


class KeepingFsdp2(Keeping, PreparedFullyShard):
    """FSDP2's."""


class KeepingReference(Keeping, PreparedReference):
    """The reference engine's."""


def taking(
    prepared: PreparedModel,
    groups: Callable[[PreparedModel], Sequence[Any]],
    when: Callable[[Any, str, Callable[[Any], None]], None],
    method: str,
    take: Callable[[Any, list[Any]], None],
) -> PreparedModel:
    """Have each group's memory taken to what is kept, ``when`` it calls a method: `before` or `after`."""
    assert isinstance(prepared, Keeping)
    kept = prepared.kept
    for group in groups(prepared):
        when(group, method, lambda of: take(of, kept))
    return prepared


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
