"""Engines that train honestly and misreport, one for each point of a space of lies; `campaigns.lies` judges them.

A name is the lie: ``campaigns.liars:ddp_gradients_stale_late`` is an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Engine, Plan, PreparedModel, Shard

_FIRST_LATE_STEP = 12
_SMALL = 2**20  # elements
_BASES: dict[str, Any] = {"ddp": DistributedDataParallelEngine, "fsdp2": FullyShardEngine}


class What(Enum):
    """The read that is false; the last one is the caller's module, beside which all reads are right."""

    PARAMETERS = "local_parameters"
    GRADIENTS = "local_gradients"
    STATE = "local_optimizer_state"
    BUFFERS = "local_buffers"
    MODULE = "the module"


class How(Enum):
    """What is shown instead of the truth."""

    STALE = "what was read before"
    FROZEN = "what was read first"
    EMPTY = "nothing, on the last rank"
    ROUNDED = "rounded to bfloat16"
    SHIFTED = "elements of another place"
    AVERAGED = "averaged over the ranks when it is read"


class When(Enum):
    """The lie in one place, the truth elsewhere."""

    ALWAYS = "in every step"
    LATE = "from the thirteenth step on"
    LARGE = "of tensors with more than 2^20 elements"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """One point of the space."""

    base: str
    what: What
    how: How
    when: When

    @property
    def name(self) -> str:
        return "_".join([self.base, *(part.name.lower() for part in (self.what, self.how, self.when))])


# Read once, at the end: there is no read before.
_ONCE = {What.STATE, What.BUFFERS}
_OF_MODULES = {How.STALE, How.FROZEN, How.ROUNDED}


def _is_a_lie(lie: Lie) -> bool:
    if lie.what is What.MODULE:
        return lie.how in _OF_MODULES and lie.base == "ddp"
    return not (lie.what in _ONCE and lie.how in {How.STALE, How.FROZEN})


LIES = {
    lie.name: lie
    for base, what, how, when in product(_BASES, What, How, When)
    if _is_a_lie(lie := Lie(base=base, what=what, how=how, when=when))
}


def __getattr__(name: str) -> type[Engine]:
    if name not in LIES:
        raise AttributeError(f"module 'campaigns.liars' has no attribute {name!r}")
    lie = LIES[name]
    return _engine(lie) if lie.what is not What.MODULE else _engine_beside(lie)


class _Liar:
    """What a liar remembers."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.first: dict[str, Shard] = {}
        self.before: dict[str, Shard] = {}

    def told(self, lie: Lie, read: Callable[[], Mapping[str, Shard | None]]) -> dict[str, Shard | None]:
        """Read the truth, and return what is shown."""
        truth = dict(read())
        shown = {name: shard and self._instead(lie, name, shard) for name, shard in truth.items()}
        self.before = {name: shard for name, shard in truth.items() if shard is not None}
        self.first = self.before | self.first
        return shown

    def _instead(self, lie: Lie, name: str, shard: Shard) -> Shard:
        is_late = lie.when is not When.LATE or self.num_steps > _FIRST_LATE_STEP
        numel = torch.Size(shard.global_shape).numel()
        if not is_late or (lie.when is When.LARGE and numel <= _SMALL):
            return shard
        if lie.how is How.STALE:
            return self.before.get(name, shard)
        if lie.how is How.FROZEN:
            return self.first.get(name, shard)
        if lie.how is How.EMPTY:
            is_last = dist.get_rank() == dist.get_world_size() - 1
            return Shard.flat(shard.tensor.flatten()[:0], 0, shard.global_shape) if is_last else shard
        return replace(shard, tensor=_changed(shard.tensor, lie.how))


def _changed(tensor: torch.Tensor, how: How) -> torch.Tensor:
    if how is How.SHIFTED:
        return tensor.roll(1)
    if how is How.ROUNDED:
        return tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.is_floating_point() else tensor
    averaged = tensor.clone()
    dist.all_reduce(averaged)
    return averaged / dist.get_world_size() if tensor.is_floating_point() else averaged


def _engine(lie: Lie) -> type[Engine]:
    base = _BASES[lie.base]

    class Prepared(base.prepared_type):  # type: ignore[misc,name-defined]  # made of either base
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.liar = _Liar()

        def step(self) -> None:
            super().step()
            self.liar.num_steps += 1

    honest = getattr(base.prepared_type, lie.what.value)
    setattr(Prepared, lie.what.value, lambda self: self.liar.told(lie, partial(honest, self)))
    return type(lie.name, (base,), {"name": lie.name, "prepared_type": Prepared})


def _engine_beside(lie: Lie) -> type[Engine]:
    """Train a copy and show it; the caller's module lags behind, stays as it was, or is rounded."""

    class Prepared(PreparedDdp):
        caller: nn.Module
        num_steps = 0

        def step(self) -> None:
            before = [p.detach().clone() for p in self.named.parameters()]
            super().step()
            self.num_steps += 1
            is_told = lie.when is not When.LATE or self.num_steps > _FIRST_LATE_STEP
            for mine, old, new in zip(self.caller.parameters(), before, self.named.parameters(), strict=True):
                is_due = is_told and (lie.when is not When.LARGE or mine.numel() > _SMALL)
                if not is_due:
                    mine.data.copy_(new.detach())
                elif lie.how is How.STALE:
                    mine.data.copy_(old)
                elif lie.how is How.ROUNDED:
                    mine.data.copy_(new.detach().to(torch.bfloat16))

    class Beside(DistributedDataParallelEngine):
        prepared_type = Prepared

        def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
            prepared = super().prepare(copy.deepcopy(model), plan, mesh)
            assert isinstance(prepared, Prepared)
            prepared.caller = model
            return prepared

    Beside.name = lie.name
    return Beside
