"""Mutants of FSDP2 that each leave out one wait, or free one buffer too early.

They are right on a CPU, where operators run one by one, and by chance elsewhere. Changes affect one prepared model:
streams and groups of its own, never objects that other engines in the process share.
"""

from __future__ import annotations

from typing import Any

from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.mutants.fsdp2_insides import (
    after_method,
    deaf,
    deaf_in,
    forget_post_reduce_events,
    forget_reduce_inputs,
    in_context,
)
from shardproof.engine.mutants.mutant import Trace, mutant

# Any, throughout: FSDP2's private classes and the streams of a device have no public types.


def _lose_event(group: Any) -> None:
    if group._all_gather_result is not None:
        group._all_gather_result = group._all_gather_result._replace(all_gather_event=None)


@mutant(after="deepspeedai/DeepSpeed#8061", trace=Trace.RACES)
class GathersBeforeTheCopyIn(FullyShardEngine):
    """The stream that gathers does not wait for the one that fills its input."""

    spoil = in_context(deaf_in("all_gather_stream", "wait_stream", "foreach_all_gather"))


@mutant(after="NVIDIA/Megatron-LM#663", trace=Trace.RACES)
class CopiesOutDuringTheGather(FullyShardEngine):
    """Whole parameters are copied out of a gather that may be in flight."""

    spoil = after_method("unshard", _lose_event)


@mutant(after="deepspeedai/DeepSpeed#7898", trace=Trace.RACES)
class ReducesBeforeGradientsAreThere(FullyShardEngine):
    """The stream that reduces does not wait for that of backward."""

    spoil = in_context(deaf("reduce_scatter_stream"))


@mutant(after="flagos-ai/Torch-FL#62", trace=Trace.RACES)
class EndsBackwardWithoutAWait(FullyShardEngine):
    """The optimizer does not wait for the work after the last reductions."""

    spoil = after_method("post_backward", forget_post_reduce_events)


@mutant(after="NVIDIA/Megatron-LM#4609", trace=Trace.RACES)
class GathersDuringTheStep(FullyShardEngine):
    """The first copy of an iteration does not wait for the optimizer."""

    spoil = in_context(deaf_in("all_gather_copy_in_stream", "wait_stream", "_root_pre_forward"))


@mutant(after="deepspeedai/DeepSpeed#7371", trace=Trace.RACES)
class FreesTheReduceInput(FullyShardEngine):
    """The input of a reduction is freed as soon as it was issued."""

    spoil = after_method("post_backward", forget_reduce_inputs)
