"""Mutants of our own wrapper that forget replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch.distributed as dist

from shardproof.engine.adapters.reference_wrapper import NAMES, ReferenceWrapperEngine
from shardproof.engine.contract import WrapperNames
from shardproof.engine.mutants.mutant import Condition, Trace, mutant
from shardproof.engine.plan import Layout, Plan
from shardproof.engine.reference import FullyShardedDataParallel
from shardproof.engine.wrapper import Wrapper


class _Apart(FullyShardedDataParallel):
    def _all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.process_group,)


@mutant(
    after="pytorch/pytorch#154888",
    kills_on=Condition(
        plan=Plan(layout=Layout.SHARD, wrapper=Wrapper()),
        because="a replica alone starts with its own values",
    ),
    trace=Trace.STATE,
)
class StartsEachReplicaOnItsOwn(ReferenceWrapperEngine):
    """Sync_module_states does not reach other replicas.

    Reported: of the two groups of a hybrid strategy one was communicated over.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Apart)
