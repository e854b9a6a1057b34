"""The catalogue of mutants: which sins there are, after whom, and the least that shows each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from engine.plan import Accumulation, Layout, Plan, Replicas

__all__ = ["MUTANTS", "Condition", "Mutant", "Trace"]


class Trace(Enum):
    """Where a sin shows; a mutant with right numbers escapes every comparison of them."""

    NUMBERS = "gradients, parameters or losses differ from the oracle's"
    COMMUNICATION = "numbers are right, what crosses between ranks is not"
    REFUSAL = "a plan that is not declared is accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The least that makes a sin visible; with anything less the mutant passes, and rightly."""

    world_size: int = 2
    steps: int = 1
    microbatches: int = 1
    plan: Plan = field(default_factory=Plan)
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """An engine wrong on purpose. ``thread`` is the public report of a real engine that sinned alike."""

    name: str
    engine_spec: str
    sin: str
    thread: str
    kills_on: Condition = field(default_factory=Condition)
    trace: Trace = Trace.NUMBERS


_LAST_MICROBATCH = Plan(accumulation=Accumulation.LAST_MICROBATCH)
_SINGLES = Plan(layout=Layout.HYBRID, replicas=Replicas.SINGLES)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="SumsInsteadOfAveraging",
        engine_spec="engine.mutants.scale:SumsInsteadOfAveraging",
        sin="gradients are summed over ranks, not averaged",
        thread="NVIDIA/Megatron-LM#3023",
        kills_on=Condition(because="one rank's sum is its average"),
    ),
    Mutant(
        name="DividesTwice",
        engine_spec="engine.mutants.scale:DividesTwice",
        sin="gradients are divided by the world size a second time",
        thread="pytorch/torchtitan#2318",
        kills_on=Condition(because="dividing by one changes nothing"),
    ),
    Mutant(
        name="NeverSynchronises",
        engine_spec="engine.mutants.synchronisation:NeverSynchronises",
        sin="gradients stay on the rank that computed them",
        thread="pytorch/pytorch#109774",
        kills_on=Condition(because="one rank has nobody to synchronise with"),
    ),
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
        name="IgnoresTheDivideFactor",
        engine_spec="engine.mutants.scale:IgnoresTheDivideFactor",
        sin="gradients are averaged although another divisor was asked for",
        thread="pytorch/torchtitan#1551",
        kills_on=Condition(plan=Plan(divide_factor=1), because="the number of ranks is the divisor anyhow"),
    ),
    Mutant(
        name="DividesByTheFactorTwice",
        engine_spec="engine.mutants.scale:DividesByTheFactorTwice",
        sin="gradients are divided by the square of the divisor asked for",
        thread="pytorch/pytorch#167178",
        kills_on=Condition(world_size=1, plan=Plan(divide_factor=2), because="one is its own square"),
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
        name="SynchronisesEveryMicrobatch",
        engine_spec="engine.mutants.synchronisation:SynchronisesEveryMicrobatch",
        sin="gradients are reduced after each microbatch although accumulation was asked",
        thread="NVIDIA/cosmos-framework#161",
        kills_on=Condition(
            steps=2,
            microbatches=2,
            plan=_LAST_MICROBATCH,
            because="the only microbatch is also the last; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
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
        name="DriftsByOneBit",
        engine_spec="engine.mutants.synchronisation:DriftsByOneBit",
        sin="one weight of one replica is off by a bit after each step",
        thread="deepspeedai/DeepSpeed#1801",
        kills_on=Condition(because="one rank has no replica to part from"),
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
        name="KeepsOnlyTheLastMicrobatch",
        engine_spec="engine.mutants.accumulation:KeepsOnlyTheLastMicrobatch",
        sin="each backward discards the gradients of the microbatches before it",
        thread="NVIDIA/Megatron-LM#7186",
        kills_on=Condition(world_size=1, microbatches=2, because="a single microbatch is the last"),
    ),
    Mutant(
        name="DoublesGradientsEveryMicrobatch",
        engine_spec="engine.mutants.accumulation:DoublesGradientsEveryMicrobatch",
        sin="each backward doubles what was accumulated before it",
        thread="NVIDIA/Megatron-LM#6660",
        kills_on=Condition(
            world_size=1, microbatches=2, because="before the first microbatch nothing is there to double"
        ),
    ),
    Mutant(
        name="ForgetsToSynchroniseOneParameter",
        engine_spec="engine.mutants.coverage:ForgetsToSynchroniseOneParameter",
        sin="the last parameter is left out of every reduction",
        thread="pytorch/pytorch#63916",
        kills_on=Condition(because="one rank has nobody to synchronise with"),
    ),
    Mutant(
        name="NeverUpdatesOneParameter",
        engine_spec="engine.mutants.coverage:NeverUpdatesOneParameter",
        sin="the optimizer's update of the last parameter is lost",
        thread="pytorch/pytorch#149205",
        kills_on=Condition(world_size=1),
    ),
    Mutant(
        name="NeverUpdatesTheLastRanksRows",
        engine_spec="engine.mutants.coverage:NeverUpdatesTheLastRanksRows",
        sin="the rows that the last rank owns keep their initial values",
        thread="pytorch/pytorch#176076",
        kills_on=Condition(because="a rank that owns all rows is left in peace"),
    ),
    Mutant(
        name="ComputesWithStaleParameters",
        engine_spec="engine.mutants.staleness:ComputesWithStaleParameters",
        sin="forward and backward use the parameters of the step before",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(world_size=1, steps=2, because="the first step has no step before it"),
    ),
    Mutant(
        name="StepsBeforeTheReduction",
        engine_spec="engine.mutants.staleness:StepsBeforeTheReduction",
        sin="the optimizer steps before the reduced gradients have arrived",
        thread="pytorch/pytorch#180666",
        kills_on=Condition(because="one rank's gradients are reduced already"),
    ),
    Mutant(
        name="DropsAUnitOnTheLastRank",
        engine_spec="engine.mutants.randomness:DropsAUnitOnTheLastRank",
        sin="the last rank alone drops the output of one unit",
        thread="pytorch/pytorch#158719",
        kills_on=Condition(because="a lone rank drops nothing"),
    ),
    Mutant(
        name="ReducesInBfloat16",
        engine_spec="engine.mutants.precision:ReducesInBfloat16",
        sin="gradients are reduced in bfloat16 whatever was asked",
        thread="pytorch/pytorch#190626",
        kills_on=Condition(
            world_size=1, because="gradients that bfloat16 holds exactly hide it from numbers"
        ),
    ),
    Mutant(
        name="GathersOnceMoreInBackward",
        engine_spec="engine.mutants.communication:GathersOnceMoreInBackward",
        sin="backward gathers one unit's parameters once more than it needs them",
        thread="pytorch/pytorch#76553",
        kills_on=Condition(steps=2, because="one rank gathers nothing; counts hold from the second step on"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ReplicatesInsteadOfSharding",
        engine_spec="engine.mutants.honesty:ReplicatesInsteadOfSharding",
        sin="parameters that were to be sharded are replicated",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(plan=Plan(layout=Layout.SHARD), because="one rank's share is the whole"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="AcceptsEveryPlan",
        engine_spec="engine.mutants.honesty:AcceptsEveryPlan",
        sin="plans beyond the declared capabilities are accepted without a word",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(plan=Plan(layout=Layout.HYBRID), because="a declared plan is honoured"),
        trace=Trace.REFUSAL,
    ),
)
