"""The entries of mutants that forget or misread which units, ranks and strategy FullyShardedDataParallel is given."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

_PLAN = Plan(layout=Layout.SHARD, wrapper=Wrapper())

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="IgnoresThePolicy",
        engine_spec="engine.mutants.wrapper_options:IgnoresThePolicy",
        sin="whatever wrap policy is given, the root is the only unit",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(plan=_PLAN, because="a model of one unit needs no policy"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="WrapsLayersUnasked",
        engine_spec="engine.mutants.wrapper_options:WrapsLayersUnasked",
        sin="without a wrap policy every layer is a unit",
        thread="huggingface/accelerate#4171",
        kills_on=Condition(plan=_PLAN, because="units that a policy names are those"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="GivesUnitsNoOptions",
        engine_spec="engine.mutants.wrapper_options:GivesUnitsNoOptions",
        sin="units that a policy names by class have another strategy and form than the root",
        thread="speechbrain/speechbrain#2010",
        kills_on=Condition(plan=_PLAN, because="the root has its options"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="IgnoresOverridesOfAPolicy",
        engine_spec="engine.mutants.wrapper_options:IgnoresOverridesOfAPolicy",
        sin="options that a policy gives to one unit have no effect",
        thread="NVIDIA/cosmos-framework#162",
        kills_on=Condition(plan=_PLAN, because="other options are those of the root"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="AlwaysShowsNames",
        engine_spec="engine.mutants.wrapper_options:AlwaysShowsNames",
        sin="parameters keep their names although flat ones were asked for",
        thread="huggingface/accelerate#3859",
        kills_on=Condition(plan=_PLAN, because="names are what is asked for otherwise"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="AlwaysShowsFlatParameters",
        engine_spec="engine.mutants.wrapper_options:AlwaysShowsFlatParameters",
        sin="parameters are flat although their names were asked for",
        thread="pytorch/pytorch#90546",
        kills_on=Condition(plan=_PLAN, because="flat is what is asked for otherwise"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsWhatTheStrategyFrees",
        engine_spec="engine.mutants.wrapper_options:KeepsWhatTheStrategyFrees",
        sin="units stay whole after forward although the strategy frees them",
        thread="pytorch/pytorch#103682",
        kills_on=Condition(plan=_PLAN, because="other strategies keep"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="FreesWhatTheStrategyKeeps",
        engine_spec="engine.mutants.wrapper_options:FreesWhatTheStrategyKeeps",
        sin="units are freed after forward although the strategy keeps them",
        thread="pytorch/pytorch#105635",
        kills_on=Condition(plan=_PLAN, because="other strategies free"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="ShardsWhatTheStrategyReplicates",
        engine_spec="engine.mutants.wrapper_options:ShardsWhatTheStrategyReplicates",
        sin="NO_SHARD shards",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(plan=_PLAN, because="other strategies shard"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="IgnoresTheGroupGiven",
        engine_spec="engine.mutants.wrapper_options:IgnoresTheGroupGiven",
        sin="the wrapper shards over all ranks whatever group is given",
        thread="pytorch/torchtitan#1551",
        kills_on=Condition(world_size=4, plan=_PLAN, because="a group of all ranks is what is used"),
    ),
    Mutant(
        name="IgnoresTheMeshGiven",
        engine_spec="engine.mutants.wrapper_options:IgnoresTheMeshGiven",
        sin="the wrapper shards over all ranks whatever mesh is given",
        thread="deepspeedai/DeepSpeed#5618",
        kills_on=Condition(world_size=4, plan=_PLAN, because="a mesh of all ranks is what is used"),
    ),
    Mutant(
        name="NeverMeetsReplicas",
        engine_spec="engine.mutants.wrapper_options:NeverMeetsReplicas",
        sin="hybrid strategies shard in one group and know of no other",
        thread="verl-project/verl#7494",
        kills_on=Condition(world_size=4, plan=_PLAN, because="other strategies have one group"),
    ),
    Mutant(
        name="ForgetsWhatToIgnore",
        engine_spec="engine.mutants.wrapper_options:ForgetsWhatToIgnore",
        sin="what is to be ignored is sharded",
        thread="pytorch/pytorch#68803",
        kills_on=Condition(plan=_PLAN, because="nothing else is ignored"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="AcceptsContradictions",
        engine_spec="engine.mutants.wrapper_options:AcceptsContradictions",
        sin="arguments that contradict each other are accepted",
        thread="hpcaitech/ColossalAI#2496",
        kills_on=Condition(plan=_PLAN, because="others are honoured"),
        trace=Trace.STATE,
    ),
)
