"""The entries of mutants that mistake parameters without a gradient."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]

_UNUSED = Plan(demands=frozenset({Capability.UNUSED}))
_BORROWED = Plan(demands=frozenset({Capability.UNUSED, Capability.RANK_DEPENDENT}))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="GivesZerosToUnusedParameters",
        engine_spec="engine.mutants.unused:GivesZerosToUnusedParameters",
        sin="parameters that no loss reached get a gradient of zeros",
        thread="facebookresearch/fairscale#605",
        kills_on=Condition(
            world_size=1, plan=_UNUSED, because="where all parameters are used none is without a gradient"
        ),
    ),
    Mutant(
        name="ReducesWhatEachRankUsed",
        engine_spec="engine.mutants.unused:ReducesWhatEachRankUsed",
        sin="each rank reduces the gradients that it has, whatever the others have",
        thread="pytorch/pytorch#158719",
        kills_on=Condition(
            plan=_BORROWED, because="ranks that use the same parameters have the same gradients"
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="TrainsFrozenParameters",
        engine_spec="engine.mutants.unused:TrainsFrozenParameters",
        sin="frozen parameters are trained",
        thread="pytorch/torchtitan#4593",
        kills_on=Condition(
            world_size=1, because="in a model without frozen parameters there is nothing to forget"
        ),
    ),
    Mutant(
        name="NeverFreesFrozenUnits",
        engine_spec="engine.mutants.unused:NeverFreesFrozenUnits",
        sin="units of frozen parameters stay gathered for ever",
        thread="pytorch/pytorch#95805",
        kills_on=Condition(
            steps=2,
            plan=Plan(layout=Layout.SHARD),
            because="what is kept is missed when it is not gathered again",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ShardsIgnoredParameters",
        engine_spec="engine.mutants.unused:ShardsIgnoredParameters",
        sin="parameters that were to be ignored are sharded",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(
            plan=Plan(layout=Layout.SHARD, ignored=("head.bias",)), because="one rank's share is the whole"
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="IgnoresMoreOnTheLastRank",
        engine_spec="engine.mutants.unused:IgnoresMoreOnTheLastRank",
        sin="the last rank leaves a parameter alone that the others shard",
        thread="pytorch/pytorch#68803",
        kills_on=Condition(because="a lone rank agrees with itself"),
        trace=Trace.COMMUNICATION,
    ),
)
