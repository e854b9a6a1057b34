"""Mutants that mistreat units which a backward through one branch of a model gathered for another branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.fsdp2_insides import groups
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import after, in_each
from shardproof.engine.mutants.reference_insides import reference_units
from shardproof.engine.reference.fsdp_state import FSDPState
from shardproof.engine.reference.param_group import ShardedState


@mutant(after="pytorch/pytorch#118118", trace=Trace.COMMUNICATION)
class GathersMistakenPrefetchesAgain(ReferenceEngine):
    """Units that one backward gathered for the next are gathered again in the next."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then free units that are being gathered at the end of every backward."""
        prepared = super().prepare(model, plan, mesh)
        for unit in reference_units(prepared):
            after(unit, "finish_backward", _drop_gathers)
        return prepared


@mutant(after="pytorch/pytorch#137348")
class TakesUnusedPrefetchesAsCurrent(FullyShardEngine):
    """Units that the last backward gathered and did not use are stale in the next step."""

    spoil = in_each(
        groups, "finalize_backward", lambda group: _keeping_gather(group, group.finalize_backward)
    )


def _drop_gathers(unit: FSDPState) -> None:
    if any(group.state is ShardedState.GATHERING for group in unit.param_groups):
        unit.reshard()


# Any: FSDP2's private classes have no public types.
def _keeping_gather(group: Any, finalize: Callable[[], None]) -> Callable[[], None]:
    def finalize_and_keep() -> None:
        gathered = group._all_gather_result
        finalize()
        group._all_gather_result = gathered

    return finalize_and_keep
