"""The entries of mutants that gather, keep or free whole parameters at the wrong time, or show others."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_WATCHED = frozenset({Capability.UNIT_STATE})


def _plan(reshard: Reshard, demands: frozenset[Capability] = _WATCHED) -> Plan:
    return Plan(layout=Layout.SHARD, grouping=Grouping.REQUIRED, reshard=reshard, demands=demands)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="KeepsRootsWhateverAsked",
        engine_spec="engine.mutants.lifetime:KeepsRootsWhateverAsked",
        sin="roots stay gathered after forward although the plan says to free them",
        thread="pytorch/pytorch#154655",
        kills_on=Condition(plan=_plan(Reshard.AFTER_FORWARD)),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesWhatItWasAskedToKeep",
        engine_spec="engine.mutants.lifetime:FreesWhatItWasAskedToKeep",
        sin="units are freed after forward although the plan says to keep them",
        thread="pytorch/PiPPy#1105",
        kills_on=Condition(plan=_plan(Reshard.KEEP)),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsWhatItWasAskedToFree",
        engine_spec="engine.mutants.lifetime:KeepsWhatItWasAskedToFree",
        sin="units are kept after forward although the plan says to free them",
        thread="pytorch/pytorch#149029",
        kills_on=Condition(plan=_plan(Reshard.AFTER_FORWARD)),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesTheRootByDefault",
        engine_spec="engine.mutants.lifetime:FreesTheRootByDefault",
        sin="the root is freed after forward where nobody said so",
        thread="ByteDance-Seed/VeOmni#806",
        kills_on=Condition(plan=_plan(Reshard.NATIVE)),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesWholeWhereAPartWasAsked",
        engine_spec="engine.mutants.lifetime:FreesWholeWhereAPartWasAsked",
        sin="parameters are sharded over all ranks after forward, not over pairs",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(
            world_size=4, plan=_plan(Reshard.TO_PAIRS), because="two ranks are a pair, and all there are"
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="FreesInTheFirstStepAlone",
        engine_spec="engine.mutants.lifetime:FreesInTheFirstStepAlone",
        sin="from the second step on units stay gathered after forward",
        thread="pytorch/pytorch#75892",
        kills_on=Condition(
            steps=2, plan=_plan(Reshard.AFTER_FORWARD), because="in the first step it does as it is told"
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="LeaksAfterBackward",
        engine_spec="engine.mutants.lifetime:LeaksAfterBackward",
        sin="units stay gathered after backward until gradients are read",
        thread="hpcaitech/ColossalAI#741",
        kills_on=Condition(plan=_plan(Reshard.AFTER_FORWARD)),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesOnlyWhatGotGradients",
        engine_spec="engine.mutants.lifetime:FreesOnlyWhatGotGradients",
        sin="units that backward never entered stay gathered after it",
        thread="pytorch/pytorch#83129",
        kills_on=Condition(
            plan=_plan(Reshard.KEEP, _WATCHED | {Capability.UNUSED}),
            because="where every unit gets gradients, every unit is freed",
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesHeldUnitsAfterBackward",
        engine_spec="engine.mutants.lifetime:FreesHeldUnitsAfterBackward",
        sin="units are freed after backward although they were told to stay gathered",
        thread="Haian-Jin/LVSM#22",
        kills_on=Condition(plan=_plan(Reshard.KEEP, _WATCHED | {Capability.KEEP_AFTER_BACKWARD})),
        trace=Trace.STATE,
    ),
    Mutant(
        name="ShowsPaddedRows",
        engine_spec="engine.mutants.lifetime:ShowsPaddedRows",
        sin="whole parameters end with rows of padding",
        thread="Lightning-AI/lightning-thunder#908",
        kills_on=Condition(
            plan=_plan(Reshard.KEEP), because="rows that the number of ranks divides are not padded"
        ),
        trace=Trace.STATE,
    ),
)
