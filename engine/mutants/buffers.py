"""Mutants that lose buffers: by those of another rank, or by a list that is out of date."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.contract import Capability, Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant

_OWN = Plan(demands=frozenset({Capability.OWN_BUFFERS}))


@mutant(
    after="huggingface/pytorch-image-models#110",
    kills_on=Condition(
        steps=2, plan=_OWN, because="a lone rank has no others, and all begin with the same buffers"
    ),
)
class GivesAllRanksTheBuffersOfOne(DistributedDataParallelEngine):
    """All ranks are given the buffers of the first.

    Reported: running statistics of all ranks but one were overwritten.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, under a plan that does not ask for own buffers."""
        return super().prepare(model, replace(plan, demands=plan.demands - {Capability.OWN_BUFFERS}), mesh)


class _PreparedListing(PreparedDdp):
    """Puts the buffers of a list back in place before each forward."""

    def __init__(self, module: nn.Module, *, named: nn.Module) -> None:
        super().__init__(module, named=named)
        self._listed = list(self._buffers_by_owner())

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        for owner, name, buffer in self._listed:
            owner.register_buffer(name, buffer, persistent=name not in owner._non_persistent_buffers_set)
        return super().__call__(*inputs, **named)

    def _buffers_by_owner(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for owner in self.named.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                yield owner, name, buffer


@mutant(
    after="pytorch/pytorch#63916",
    kills_on=Condition(world_size=1, steps=2, because="before the first forward nothing is replaced"),
)
class KeepsReplacedBuffers(DistributedDataParallelEngine):
    """Buffers that forward replaced are put back.

    Reported: buffers were listed once, and a forward that replaced one made the list stale.
    """

    prepared_type = _PreparedListing
