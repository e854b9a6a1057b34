"""Mutants of the reference engine's wrapper that ignore replicas, or the shards of other axes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.reference_wrapper import NAMES, ReferenceWrapperEngine
from shardproof.engine.contract import WrapperNames
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.reference import FullyShardedDataParallel
from shardproof.engine.reference.fsdp1.flat import FlatPiece
from shardproof.engine.reference.fsdp1.full_params import layout_of


class _Apart(FullyShardedDataParallel):
    def _all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.process_group,)


@mutant(after="pytorch/pytorch#154888", trace=Trace.STATE)
class StartsEachReplicaOnItsOwn(ReferenceWrapperEngine):
    """sync_module_states does not reach other replicas."""

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Apart)


class _WrapsAndSums(FullyShardedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for group in self.groups:
            group.divide_factor = 1.0


@mutant(after="NVIDIA/Megatron-LM#3023")
class SumsWhatIsWrapped(ReferenceWrapperEngine):
    """Gradients of a module in the wrapper are summed over ranks, not averaged."""

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_WrapsAndSums)


class _OfFirstPieces(FullyShardedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for group in self.groups:
            for piece in layout_of(group).parameters:
                piece.own_part = partial(_first, piece)  # type: ignore[method-assign]  # of this one


def _first(piece: FlatPiece, value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole[tuple(slice(size) for size in piece.shape)]


@mutant(after="ROCm/Megatron-LM#63", trace=Trace.STATE)
class LoadsTheFirstPieceEverywhere(ReferenceWrapperEngine):
    """Every rank of a tensor-parallel axis loads the part of the first one."""

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_OfFirstPieces)
