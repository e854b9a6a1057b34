"""Mutants of our own wrapper that forget replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch.distributed as dist

from engine.adapters.reference_wrapper import NAMES, ReferenceWrapperEngine
from engine.contract import WrapperNames
from engine.reference import FullyShardedDataParallel

__all__ = ["StartsEachReplicaOnItsOwn"]


class _Apart(FullyShardedDataParallel):
    def _all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.process_group,)


class StartsEachReplicaOnItsOwn(ReferenceWrapperEngine):
    """sync_module_states reaches the ranks of one replica; each replica starts with values of its own.

    After pytorch/pytorch#154888: of the two groups of a hybrid strategy one was communicated over.
    """

    name = "mutant.StartsEachReplicaOnItsOwn"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Apart)
