"""The entries of mutants that forget, invert or misread one option of FullyShardedDataParallel."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

_PLAN = Plan(layout=Layout.SHARD, wrapper=Wrapper())


def _mutant(
    name: str, sin: str, thread: str, because: str, trace: Trace = Trace.STATE, ranks: int = 2
) -> Mutant:
    return Mutant(
        name=name,
        engine_spec=f"engine.mutants.wrapper_options:{name}",
        sin=sin,
        thread=thread,
        kills_on=Condition(world_size=ranks, plan=_PLAN, because=because),
        trace=trace,
    )


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "IgnoresThePolicy",
        "whatever wrap policy is given, the root is the only unit",
        "Tencent-Hunyuan/UniRL#410",
        "a model of one unit needs no policy",
    ),
    _mutant(
        "WrapsLayersUnasked",
        "without a wrap policy every layer is a unit",
        "huggingface/accelerate#4171",
        "units that a policy names are those",
    ),
    _mutant(
        "AlwaysShowsNames",
        "parameters keep their names although flat ones were asked for",
        "huggingface/accelerate#3859",
        "names are what is asked for otherwise",
    ),
    _mutant(
        "AlwaysShowsFlatParameters",
        "parameters are flat although their names were asked for",
        "pytorch/pytorch#90546",
        "flat is what is asked for otherwise",
    ),
    _mutant(
        "KeepsWhatTheStrategyFrees",
        "units stay whole after forward although the strategy frees them",
        "pytorch/pytorch#103682",
        "other strategies keep",
    ),
    _mutant(
        "FreesWhatTheStrategyKeeps",
        "units are freed after forward although the strategy keeps them",
        "pytorch/pytorch#105635",
        "other strategies free",
    ),
    _mutant(
        "ShardsWhatTheStrategyReplicates",
        "NO_SHARD shards",
        "Tencent-Hunyuan/UniRL#410",
        "other strategies shard",
    ),
    _mutant(
        "IgnoresTheGroupGiven",
        "the wrapper shards over all ranks whatever group is given",
        "pytorch/torchtitan#1551",
        "a group of all ranks is what is used",
        Trace.NUMBERS,
        ranks=4,
    ),
    _mutant(
        "IgnoresTheMeshGiven",
        "the wrapper shards over all ranks whatever mesh is given",
        "deepspeedai/DeepSpeed#5618",
        "a mesh of all ranks is what is used",
        Trace.NUMBERS,
        ranks=4,
    ),
    _mutant(
        "NeverMeetsReplicas",
        "hybrid strategies shard in one group and know of no other",
        "verl-project/verl#7494",
        "other strategies have one group",
        Trace.NUMBERS,
        ranks=4,
    ),
    _mutant(
        "ForgetsWhatToIgnore",
        "what is to be ignored is sharded",
        "pytorch/pytorch#68803",
        "nothing else is ignored",
    ),
    _mutant(
        "ReadsOffloadedGradientsTooEarly",
        "offloaded gradients are read before they are there",
        "pytorch/pytorch#180665",
        "nothing else is offloaded",
        Trace.NUMBERS,
    ),
    _mutant(
        "SwapsBackwardPrefetch",
        "each moment of backward prefetch is taken for another",
        "pytorch/pytorch#107058",
        "only the order of calls shows it",
        Trace.COMMUNICATION,
    ),
    _mutant(
        "InvertsForwardPrefetch",
        "forward prefetches unless asked to",
        "pytorch/pytorch#106030",
        "only the order of calls shows it",
        Trace.COMMUNICATION,
    ),
    _mutant(
        "GathersAllUnitsAtOnce",
        "every unit is being gathered before the first one runs",
        "pytorch/pytorch#107058",
        "a lone rank gathers nothing",
        Trace.COMMUNICATION,
    ),
    _mutant(
        "IgnoresTheInitialiser",
        "param_init_fn is never called",
        "pytorch/pytorch#105840",
        "models with memory need none",
    ),
    _mutant(
        "NeverResets",
        "modules without memory are left at zeros",
        "EvolvingLMMs-Lab/lmms-engine#185",
        "models with memory are left as they are",
    ),
    _mutant(
        "LeavesBuffersWithoutMemory",
        "buffers without memory are left without",
        "verl-project/verl#7834",
        "models with memory are left as they are",
        Trace.CRASH,
    ),
    _mutant(
        "StartsEachRankOnItsOwn",
        "sync_module_states has no effect",
        "allenai/OLMo-core#319",
        "ranks that start alike need no broadcast",
    ),
    _mutant(
        "WrapsContainersSilently",
        "a list of modules is wrapped without a warning",
        "pytorch/pytorch#109385",
        "other modules are wrapped silently, and rightly",
        Trace.STATE,
        ranks=1,
    ),
    _mutant(
        "AcceptsContradictions",
        "arguments that contradict each other are accepted",
        "hpcaitech/ColossalAI#2496",
        "others are honoured",
    ),
)
