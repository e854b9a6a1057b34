"""The entries of mutants that let gradients pile up, or take memory from what is not theirs."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_FREED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="PilesUpReduceInputs",
        engine_spec="engine.mutants.leaks:PilesUpReduceInputs",
        sin="the input of every reduction is kept for ever",
        thread="hpcaitech/ColossalAI#741",
        kills_on=Condition(
            steps=3, plan=_FREED, because="the first two steps have nothing to be compared with"
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="PilesUpGradients",
        engine_spec="engine.mutants.leaks:PilesUpGradients",
        sin="reduced gradients of every step are kept for ever",
        thread="hpcaitech/ColossalAI#741",
        kills_on=Condition(
            steps=3, plan=_FREED, because="the first two steps have nothing to be compared with"
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsWholeGradients",
        engine_spec="engine.mutants.leaks:KeepsWholeGradients",
        sin="whole gradients are kept until the step",
        thread="pytorch/pytorch#169349",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsGradientsUntilTheStep",
        engine_spec="engine.mutants.leaks:KeepsGradientsUntilTheStep",
        sin="whole gradients stay beside their reduced shards until the step",
        thread="pytorch/pytorch#169349",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesTheUsersInputs",
        engine_spec="engine.mutants.leaks:FreesTheUsersInputs",
        sin="the memory of inputs is given back after backward",
        thread="InternLM/xtuner#1948",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesTheUsersOutputs",
        engine_spec="engine.mutants.leaks:FreesTheUsersOutputs",
        sin="the memory of outputs is given back after backward",
        thread="InternLM/xtuner#1948",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="MovesWhatItWasToLeave",
        engine_spec="engine.mutants.leaks:MovesWhatItWasToLeave",
        sin="buffers and ignored parameters are given other memory in every step",
        thread="InternLM/xtuner#1948",
        kills_on=Condition(plan=_FREED),
        trace=Trace.STATE,
    ),
)
