"""The entries of mutants that sin under a hybrid layout alone."""

from __future__ import annotations

from dataclasses import replace

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Layout, Plan, Replicas

__all__ = ["MUTANTS"]

_SINGLES = Plan(layout=Layout.HYBRID, replicas=Replicas.SINGLES)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="NeverSynchronisesReplicas",
        engine_spec="engine.mutants.hybrid:NeverSynchronisesReplicas",
        sin="gradients are reduced within a replica, never between replicas",
        thread="verl-project/verl#7493",
        kills_on=Condition(plan=Plan(layout=Layout.HYBRID), because="only a hybrid layout has replicas"),
    ),
    Mutant(
        name="NeverSynchronisesSingles",
        engine_spec="engine.mutants.hybrid:NeverSynchronisesSingles",
        sin="where each replica is a single rank, gradients stay on it",
        thread="pytorch/pytorch#154888",
        kills_on=Condition(plan=_SINGLES, because="a replica of several ranks is reduced with the others"),
    ),
    Mutant(
        name="DividesOneReplicaTwice",
        engine_spec="engine.mutants.hybrid:DividesOneReplicaTwice",
        sin="where there is one replica, gradients are divided by the number of its shards a second time",
        thread="pytorch/torchtitan#2318",
        kills_on=Condition(
            plan=Plan(layout=Layout.HYBRID, replicas=Replicas.ONE),
            because="several replicas are divided once",
        ),
    ),
    Mutant(
        name="TransposesTheMesh",
        engine_spec="engine.mutants.hybrid:TransposesTheMesh",
        sin="a hybrid layout shards over its replicas and replicates over its shards",
        thread="pytorch/torchtitan#1483",
        kills_on=Condition(plan=_SINGLES, because="a mesh of one axis has no transpose"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="IgnoresTheDivideFactorOfSingles",
        engine_spec="engine.mutants.hybrid:IgnoresTheDivideFactorOfSingles",
        sin="where each replica is a single rank, gradients are averaged although another divisor was asked for",
        thread="pytorch/pytorch#167178",
        kills_on=Condition(
            plan=replace(_SINGLES, divide_factor=1), because="replicas of several ranks are divided as asked"
        ),
    ),
    Mutant(
        name="ReducesReplicasEveryMicrobatch",
        engine_spec="engine.mutants.hybrid:ReducesReplicasEveryMicrobatch",
        sin="under a hybrid layout gradients are reduced after each microbatch although accumulation was asked",
        thread="NVIDIA/cosmos-framework#161",
        kills_on=Condition(
            steps=2,
            microbatches=2,
            plan=Plan(layout=Layout.HYBRID, accumulation=Accumulation.LAST_MICROBATCH),
            because="other layouts are honest, and the only microbatch is also the last",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="LosesMicrobatchesOfReplicas",
        engine_spec="engine.mutants.hybrid:LosesMicrobatchesOfReplicas",
        sin="under a hybrid layout each backward discards the microbatches before it",
        thread="NVIDIA/Megatron-LM#7186",
        kills_on=Condition(
            microbatches=2, plan=Plan(layout=Layout.HYBRID), because="other layouts are honest"
        ),
    ),
    Mutant(
        name="ShardsOverReplicas",
        engine_spec="engine.mutants.hybrid:ShardsOverReplicas",
        sin="under a hybrid layout parameters are sharded over all ranks",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(
            world_size=4,
            steps=2,
            plan=Plan(layout=Layout.HYBRID),
            because="with two ranks an axis is of one; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
)
