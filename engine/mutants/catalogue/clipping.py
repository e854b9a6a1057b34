"""The entries of mutants that clip by the wrong norm, on the wrong ranks, or not at all."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]

_CLIP = Plan(demands=frozenset({Capability.CLIP}))
_HYBRID = Plan(layout=Layout.HYBRID, demands=frozenset({Capability.CLIP}))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ClipsByTheLocalNorm",
        engine_spec="engine.mutants.clipping:ClipsByTheLocalNorm",
        sin="each rank clips its shards by their own norm",
        thread="pytorch/pytorch#170862",
        kills_on=Condition(plan=_CLIP, because="one rank's shards are all there is"),
    ),
    Mutant(
        name="CountsTheNormOncePerReplica",
        engine_spec="engine.mutants.clipping:CountsTheNormOncePerReplica",
        sin="the norm counts every parameter once for each replica",
        thread="ByteDance-Seed/VeOmni#184",
        kills_on=Condition(
            plan=_HYBRID, because="other layouts have no replicas, and a maximum does not grow with them"
        ),
    ),
    Mutant(
        name="TakesTheRootOfAMaximum",
        engine_spec="engine.mutants.clipping:TakesTheRootOfAMaximum",
        sin="the norm of infinite order is one",
        thread="meta-pytorch/torchrec#3199",
        kills_on=Condition(world_size=1, plan=_CLIP, because="other orders are right"),
    ),
    Mutant(
        name="ReducesIntoItsZero",
        engine_spec="engine.mutants.clipping:ReducesIntoItsZero",
        sin="a rank that owns nothing brings the largest norm of the steps before",
        thread="pytorch/pytorch#63881",
        kills_on=Condition(steps=2, plan=_CLIP, because="the first norm comes after a zero"),
    ),
    Mutant(
        name="NeverClips",
        engine_spec="engine.mutants.clipping:NeverClips",
        sin="the norm is right, and nothing is scaled by it",
        thread="deepspeedai/DeepSpeed#5150",
        kills_on=Condition(
            world_size=1, plan=_CLIP, because="gradients below the limit are not scaled anyhow"
        ),
    ),
    Mutant(
        name="ScalesSmallGradientsUp",
        engine_spec="engine.mutants.clipping:ScalesSmallGradientsUp",
        sin="gradients below the limit are scaled up to it",
        thread="DingfanChen/GS-WGAN#5",
        kills_on=Condition(
            world_size=1, plan=_CLIP, because="gradients above the limit are scaled down rightly"
        ),
    ),
    Mutant(
        name="ReturnsNoNorm",
        engine_spec="engine.mutants.clipping:ReturnsNoNorm",
        sin="clipping does not return the norm",
        thread="pytorch/pytorch#87401",
        kills_on=Condition(world_size=1, plan=_CLIP),
    ),
    Mutant(
        name="ClipsByTheLastMicrobatch",
        engine_spec="engine.mutants.clipping:ClipsByTheLastMicrobatch",
        sin="accumulated gradients are clipped by the norm of the last microbatch",
        thread="hpcaitech/ColossalAI#5002",
        kills_on=Condition(
            world_size=1, microbatches=2, plan=_CLIP, because="a single microbatch is the last"
        ),
    ),
    Mutant(
        name="ClipsOnOneRank",
        engine_spec="engine.mutants.clipping:ClipsOnOneRank",
        sin="one rank alone clips",
        thread="deepspeedai/DeepSpeed#1801",
        kills_on=Condition(plan=_CLIP, because="a lone rank is that one"),
    ),
)
