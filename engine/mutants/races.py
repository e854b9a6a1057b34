"""Mutants of FSDP2 whose streams do not wait: right on a CPU, where operators run one by one, and by luck elsewhere.

Each leaves out one wait, or lets go of one buffer too early. What is changed belongs to one prepared model: streams
and groups of its own, never what other engines in the process share. Those of the reference engine are in
`reference_races`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.contract import Plan, PreparedModel
from engine.mutants.fsdp2_insides import Forgetful, after_method, before_method, deaf, deaf_in, in_context

__all__ = [
    "CopiesOutDuringTheGather",
    "EndsBackwardWithoutAWait",
    "FreesTheGatherOutput",
    "FreesTheReduceInput",
    "FreesTheReplicasBuffer",
    "GathersBeforeTheCopyIn",
    "GathersDuringTheStep",
    "GathersPartsBeforeTheyAreCut",
    "ReducesBeforeGradientsAreThere",
    "ReducesReplicasBeforeTheScatter",
    "ReusesTheReduceInput",
]

# Any, throughout: FSDP2's insides and the streams of a device have no public types.


class GathersBeforeTheCopyIn(FullyShardEngine):
    """The stream that gathers does not wait for the one that fills the gather's input.

    After deepspeedai/DeepSpeed#8061: a stream waited for one other, and the copies into its bucket came from several.
    """

    name = "mutant.GathersBeforeTheCopyIn"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have that stream not wait where gathers are issued."""
        sin = deaf_in("all_gather_stream", "wait_stream", "foreach_all_gather")
        return in_context(super().prepare(model, plan, mesh), sin)


class CopiesOutDuringTheGather(FullyShardEngine):
    """Whole parameters are copied out of the gather's output before it is there.

    After NVIDIA/Megatron-LM#663: with gathers overlapped, forward read parameters that had not arrived.
    """

    name = "mutant.CopiesOutDuringTheGather"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then lose the event of each gather."""

        def lose_event(group: Any) -> None:
            if group._all_gather_result is not None:
                group._all_gather_result = group._all_gather_result._replace(all_gather_event=None)

        return after_method(super().prepare(model, plan, mesh), "unshard", lose_event)


class ReducesBeforeGradientsAreThere(FullyShardEngine):
    """The stream that reduces does not wait for the one on which backward computes.

    After deepspeedai/DeepSpeed#7898: the stream that reduced waited for another stream than that of backward.
    """

    name = "mutant.ReducesBeforeGradientsAreThere"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have that stream wait for no other."""
        return in_context(super().prepare(model, plan, mesh), deaf("reduce_scatter_stream"))


class EndsBackwardWithoutAWait(FullyShardEngine):
    """Nobody waits for what follows the last reductions, so the optimizer may read gradients in the making.

    After flagos-ai/Torch-FL#62: gradients were read while their reduction was under way on another stream.
    """

    name = "mutant.EndsBackwardWithoutAWait"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then forget the events for which the end of backward is to wait."""

        def forget_events(group: Any) -> None:
            group.comm_ctx._last_post_reduce_events.clear()

        return after_method(super().prepare(model, plan, mesh), "post_backward", forget_events)


class GathersDuringTheStep(FullyShardEngine):
    """The first gather of an iteration does not wait for the optimizer.

    After NVIDIA/Megatron-LM#4609: gathers that overlapped the step shared a buffer with what it was reading.
    """

    name = "mutant.GathersDuringTheStep"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream that reads the shards not wait where an iteration begins."""
        sin = deaf_in("all_gather_copy_in_stream", "wait_stream", "_root_pre_forward")
        return in_context(super().prepare(model, plan, mesh), sin)


class ReusesTheReduceInput(FullyShardEngine):
    """The input of a reduction is let go when the next one begins, whether or not it was read by then.

    After deepspeedai/DeepSpeed#7188: one of two buffers was filled again before its reduction had finished.
    """

    name = "mutant.ReusesTheReduceInput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep inputs without their events."""

        def forget_events(context: Any) -> None:
            context.reduce_scatter_states = Forgetful()

        return in_context(super().prepare(model, plan, mesh), forget_events)


class FreesTheReduceInput(FullyShardEngine):
    """Nobody keeps the input of a reduction: its memory is free as soon as the reduction was issued.

    After deepspeedai/DeepSpeed#7371: the buffer of a reduction under way was given to the gradients that came next.
    """

    name = "mutant.FreesTheReduceInput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then let go of each reduction's input after it."""

        def let_go(group: Any) -> None:
            group.comm_ctx.reduce_scatter_states.clear()

        return after_method(super().prepare(model, plan, mesh), "post_backward", let_go)


class FreesTheGatherOutput(FullyShardEngine):
    """In forward the output of a gather is let go although the copy out of it may still be reading.

    After NVIDIA/Megatron-LM#5788: gathered memory was given back with neither an event nor record_stream.
    """

    name = "mutant.FreesTheGatherOutput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then lose the event of the last copy before each wait for a gather."""

        def lose_event(group: Any) -> None:
            last = group.comm_ctx.all_gather_state
            if last is not None and group._all_gather_result is not None:
                group.comm_ctx.all_gather_state = last._replace(event=None)

        return before_method(super().prepare(model, plan, mesh), "wait_for_unshard", lose_event)


class ReducesReplicasBeforeTheScatter(FullyShardEngine):
    """Under a hybrid layout shards are reduced across replicas before they are reduced within one.

    After NVIDIA/Megatron-LM#3670: with overlapped reductions over several instances gradients came out wrong.
    """

    name = "mutant.ReducesReplicasBeforeTheScatter"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream between replicas wait for no other."""
        return in_context(super().prepare(model, plan, mesh), deaf("all_reduce_stream"))


class FreesTheReplicasBuffer(FullyShardEngine):
    """Under a hybrid layout that reduces in a dtype of its own, what replicas reduce is let go at once.

    After pytorch/pytorch#180665: memory of one stream was handed out again while another stream was reading it.
    """

    name = "mutant.FreesTheReplicasBuffer"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep no buffer across units."""

        def let_go(group: Any) -> None:
            group._all_reduce_state = None

        return after_method(super().prepare(model, plan, mesh), "post_backward", let_go)


class GathersPartsBeforeTheyAreCut(FullyShardEngine):
    """What is kept between forward and backward for pairs of ranks is gathered before it was copied.

    After deepspeedai/DeepSpeed#8061: one of several streams that filled a buffer was not waited for.
    """

    name = "mutant.GathersPartsBeforeTheyAreCut"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then lose the event of each copy."""

        def lose_event(group: Any) -> None:
            group._reshard_after_forward_event = None

        return after_method(super().prepare(model, plan, mesh), "reshard", lose_event)
