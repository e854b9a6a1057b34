"""The entries of mutants that keep whole parameters, or buffers, for too long."""

from __future__ import annotations

from dataclasses import replace

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_FREED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)
_KEPT = replace(_FREED, reshard=Reshard.KEEP)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="KeepsUnitsUntilBackwardEnds",
        engine_spec="engine.mutants.retention:KeepsUnitsUntilBackwardEnds",
        sin="backward frees no unit before the last of them has run",
        thread="pytorch/pytorch#95805",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesAllUnitsTogether",
        engine_spec="engine.mutants.retention:FreesAllUnitsTogether",
        sin="all units are freed together when the last has run backward",
        thread="pytorch/xla#5484",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsGatherOutputs",
        engine_spec="engine.mutants.retention:KeepsGatherOutputs",
        sin="the output of each gather is kept until the step",
        thread="pytorch/pytorch#149029",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsBuffersUntilTheStep",
        engine_spec="engine.mutants.retention:KeepsBuffersUntilTheStep",
        sin="buffers of gathers are taken back and lent to nobody until the step",
        thread="pytorch/pytorch#154704",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="RemembersAUnit",
        engine_spec="engine.mutants.retention:RemembersAUnit",
        sin="whole parameters of one unit are kept from step to step",
        thread="pytorch/pytorch#75892",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="RemembersAUnitOfTheReference",
        engine_spec="engine.mutants.retention:RemembersAUnitOfTheReference",
        sin="one unit's last gather outlives the step",
        thread="pytorch/pytorch#75901",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="PrefetchesEverything",
        engine_spec="engine.mutants.retention:PrefetchesEverything",
        sin="each unit asks for the gathers of all that follow",
        thread="deepspeedai/DeepSpeed#1069",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="GathersEverythingAhead",
        engine_spec="engine.mutants.retention:GathersEverythingAhead",
        sin="all units are on their way together",
        thread="deepspeedai/DeepSpeed#1069",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="GathersAgainWhatItWasAskedToKeep",
        engine_spec="engine.mutants.retention:GathersAgainWhatItWasAskedToKeep",
        sin="parameters that were to be kept are freed and gathered again",
        thread="pytorch/PiPPy#1105",
        kills_on=Condition(plan=_KEPT),
        trace=Trace.STATE,
    ),
)
