"""The entries of mutants that sin where tensors are cut already, or in a pipeline."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Layout, Plan

__all__ = ["MUTANTS"]

_MODULE = "engine.mutants.model_parallel"
_EXPERTS = Plan(layout=Layout.SHARD, expert_parallel=2, experts=("blocks.0.experts.inward",))
_CUT = Plan(layout=Layout.SHARD, tensor_parallel=2)
_CLIPPED = Plan(layout=Layout.SHARD, tensor_parallel=2, demands=frozenset({Capability.CLIP}))
_STAGED = Plan(pipeline_stages=2, accumulation=Accumulation.LAST_MICROBATCH)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ScalesByTheTensorRanks",
        engine_spec=f"{_MODULE}:ScalesByTheTensorRanks",
        sin="gradients of tensors that are cut are multiplied by the number of pieces",
        thread="pytorch/torchtitan#1551",
        kills_on=Condition(world_size=2, plan=_CUT, because="what is not cut has one piece"),
    ),
    Mutant(
        name="ScalesExpertsByTheirRanks",
        engine_spec=f"{_MODULE}:ScalesExpertsByTheirRanks",
        sin="gradients of experts are multiplied by the number of ranks that share them out",
        thread="pytorch/torchtitan#1551",
        kills_on=Condition(world_size=2, plan=_EXPERTS, because="without experts nobody shares them out"),
    ),
    Mutant(
        name="MixesExpertsUp",
        engine_spec=f"{_MODULE}:MixesExpertsUp",
        sin="gradients of experts are averaged over ranks that hold other experts",
        thread="pytorch/torchtitan#1551",
        kills_on=Condition(world_size=2, plan=_EXPERTS, because="without experts nobody shares them out"),
    ),
    Mutant(
        name="KeepsNormsOnTheirTensorRank",
        engine_spec=f"{_MODULE}:KeepsNormsOnTheirTensorRank",
        sin="gradients of norms are not reduced over the tensor axis, whose ranks see different rows",
        thread="THUDM/slime#1366",
        kills_on=Condition(
            world_size=2, plan=_CUT, because="without that axis every rank has rows of its own"
        ),
    ),
    Mutant(
        name="ClipsOnOneTensorRank",
        engine_spec=f"{_MODULE}:ClipsOnOneTensorRank",
        sin="gradients are clipped on the first rank of the tensor axis alone",
        thread="deepspeedai/DeepSpeed#1801",
        kills_on=Condition(world_size=2, plan=_CLIPPED, because="nothing else is clipped"),
    ),
    Mutant(
        name="LosesTheLastRowsOfUnevenPieces",
        engine_spec=f"{_MODULE}:LosesTheLastRowsOfUnevenPieces",
        sin="the last of the rows that both axes cut unevenly get no gradient",
        thread="pytorch/torchtitan#4593",
        kills_on=Condition(
            world_size=4, plan=_CUT, because="two cuts of one dim need two axes of several ranks"
        ),
    ),
    Mutant(
        name="SwapsTheCutsOfOneDim",
        engine_spec=f"{_MODULE}:SwapsTheCutsOfOneDim",
        sin="rows that both axes cut lie as if the data axis had cut them first",
        thread="pytorch/torchtitan#1483",
        kills_on=Condition(world_size=4, plan=_CUT, because="one cut has one order"),
    ),
    Mutant(
        name="ReducesBeforeTheLastBackward",
        engine_spec=f"{_MODULE}:ReducesBeforeTheLastBackward",
        sin="in a pipeline the backward after the last forward is reduced, and those after it are not",
        thread="NVIDIA/Megatron-LM#1012",
        kills_on=Condition(
            world_size=4,
            microbatches=2,
            plan=_STAGED,
            because="stages of one rank have nobody to reduce with",
        ),
    ),
    Mutant(
        name="KeepsOnlyTheLastMicrobatchOfAPipeline",
        engine_spec=f"{_MODULE}:KeepsOnlyTheLastMicrobatchOfAPipeline",
        sin="in a pipeline the microbatches before the last are lost",
        thread="NVIDIA/Megatron-LM#7166",
        kills_on=Condition(
            world_size=2, microbatches=2, plan=_STAGED, because="a lone microbatch is the last"
        ),
    ),
    Mutant(
        name="NeverSynchronisesTheFirstStage",
        engine_spec=f"{_MODULE}:NeverSynchronisesTheFirstStage",
        sin="gradients of a pipeline's first stage stay on the rank that computed them",
        thread="pytorch/pytorch#63916",
        kills_on=Condition(
            world_size=4,
            microbatches=2,
            plan=_STAGED,
            because="stages of one rank have nobody to reduce with",
        ),
    ),
    Mutant(
        name="ReducesEveryMicrobatchOfAPipeline",
        engine_spec=f"{_MODULE}:ReducesEveryMicrobatchOfAPipeline",
        sin="in a pipeline gradients are reduced after each microbatch",
        thread="NVIDIA/cosmos-framework#161",
        kills_on=Condition(
            world_size=4,
            steps=2,
            microbatches=2,
            plan=_STAGED,
            because="stages of one rank have nobody to reduce with; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
)
