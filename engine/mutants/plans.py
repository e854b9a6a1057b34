"""Plans that several mutants need to show: four blocks as units, and what FullyShardedDataParallel wraps."""

from __future__ import annotations

from dataclasses import replace

from engine.contract import Capability, Grouping, Layout, Plan, Reshard, Wrapper

__all__ = ["CALLS_METHODS", "HYBRID_BLOCKS", "SHARDED_BLOCKS", "UNITS", "WRAPPED"]

UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
SHARDED_BLOCKS = Plan(
    layout=Layout.SHARD, units=UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
)
HYBRID_BLOCKS = replace(SHARDED_BLOCKS, layout=Layout.HYBRID)
WRAPPED = Plan(layout=Layout.SHARD, wrapper=Wrapper())
CALLS_METHODS = Plan(demands=frozenset({Capability.WRAPPER}))
