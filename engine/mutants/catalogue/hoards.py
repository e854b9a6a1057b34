"""The entries of mutants that hold more than their share between steps."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]

_SHARDED = Condition(plan=Plan(layout=Layout.SHARD), because="one rank's share is the whole")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="KeepsTheModelInAClosure",
        engine_spec="engine.mutants.hoards:KeepsTheModelInAClosure",
        sin="every rank keeps the parameters that the model was built with",
        thread="pytorch/pytorch#114299",
        kills_on=_SHARDED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsTheModelOnTheLastRank",
        engine_spec="engine.mutants.hoards:KeepsTheModelOnTheLastRank",
        sin="the last rank keeps the parameters that the model was built with",
        thread="verl-project/verl#5125",
        kills_on=_SHARDED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="AveragesWholeParameters",
        engine_spec="engine.mutants.hoards:AveragesWholeParameters",
        sin="every rank keeps an average of the whole parameters",
        thread="TencentARC/RollingForcing#15",
        kills_on=_SHARDED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsWholesAfterTheFirstStep",
        engine_spec="engine.mutants.hoards:KeepsWholesAfterTheFirstStep",
        sin="from the second step on every rank keeps whole parameters",
        thread="pytorch/pytorch#147179",
        kills_on=Condition(
            plan=Plan(layout=Layout.SHARD), steps=2, because="the first step leaves shards alone"
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="CutsGradientsFromWholeBuffers",
        engine_spec="engine.mutants.hoards:CutsGradientsFromWholeBuffers",
        sin="shards of gradients are views of whole buffers",
        thread="hpcaitech/ColossalAI#1955",
        kills_on=_SHARDED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="CutsStateFromWholeBuffers",
        engine_spec="engine.mutants.hoards:CutsStateFromWholeBuffers",
        sin="shards of optimizer state are views of whole buffers",
        thread="cloneofsimo/min-fsdp#1",
        kills_on=_SHARDED,
        trace=Trace.STATE,
    ),
)
