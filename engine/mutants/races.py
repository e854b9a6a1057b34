"""Mutants of FSDP2 whose streams do not wait: right on a CPU, where operators run one by one, and by luck elsewhere.

Each leaves out one wait, or lets go of one buffer too early. What is changed belongs to one prepared model: streams
and groups of its own, never what other engines in the process share. Those of the reference engine are in
`reference_races`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.contract import Plan, PreparedModel

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
        """Shard honestly, then have that stream wait for no other."""
        return _in_context(super().prepare(model, plan, mesh), _deaf("all_gather_stream"))


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

        return _after_method(super().prepare(model, plan, mesh), "unshard", lose_event)


class ReducesBeforeGradientsAreThere(FullyShardEngine):
    """The stream that reduces does not wait for the one on which backward computes.

    After deepspeedai/DeepSpeed#7898: the stream that reduced waited for another stream than that of backward.
    """

    name = "mutant.ReducesBeforeGradientsAreThere"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have that stream wait for no other."""
        return _in_context(super().prepare(model, plan, mesh), _deaf("reduce_scatter_stream"))


class EndsBackwardWithoutAWait(FullyShardEngine):
    """Nobody waits for what follows the last reductions, so the optimizer may read gradients in the making.

    After flagos-ai/Torch-FL#62: gradients were read while their reduction was under way on another stream.
    """

    name = "mutant.EndsBackwardWithoutAWait"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then forget the events for which the end of backward is to wait."""

        def forget_events(group: Any) -> None:
            group.comm_ctx._last_post_reduce_events.clear()

        return _after_method(super().prepare(model, plan, mesh), "post_backward", forget_events)


class GathersDuringTheStep(FullyShardEngine):
    """The first gather of an iteration does not wait for the optimizer.

    After NVIDIA/Megatron-LM#4609: gathers that overlapped the step shared a buffer with what it was reading.
    """

    name = "mutant.GathersDuringTheStep"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream that reads the shards wait for no other stream."""
        return _in_context(super().prepare(model, plan, mesh), _deaf("all_gather_copy_in_stream"))


class ReusesTheReduceInput(FullyShardEngine):
    """The input of a reduction is let go when the next one begins, whether or not it was read by then.

    After deepspeedai/DeepSpeed#7188: one of two buffers was filled again before its reduction had finished.
    """

    name = "mutant.ReusesTheReduceInput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep inputs without their events."""

        def forget_events(context: Any) -> None:
            context.reduce_scatter_states = _Forgetful()

        return _in_context(super().prepare(model, plan, mesh), forget_events)


class FreesTheReduceInput(FullyShardEngine):
    """Nobody keeps the input of a reduction: its memory is free as soon as the reduction was issued.

    After deepspeedai/DeepSpeed#7371: the buffer of a reduction under way was given to the gradients that came next.
    """

    name = "mutant.FreesTheReduceInput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then let go of each reduction's input after it."""

        def let_go(group: Any) -> None:
            group.comm_ctx.reduce_scatter_states.clear()

        return _after_method(super().prepare(model, plan, mesh), "post_backward", let_go)


class FreesTheGatherOutput(FullyShardEngine):
    """The output of a gather is let go although the copy out of it may still be reading.

    After NVIDIA/Megatron-LM#5788: gathered memory was given back with neither an event nor record_stream.
    """

    name = "mutant.FreesTheGatherOutput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have gathers wait for no copy."""
        prepared = super().prepare(model, plan, mesh)
        for group in _groups(prepared):
            group._wait_all_gather_streams_on_event = _ignore
        return prepared


class ReducesReplicasBeforeTheScatter(FullyShardEngine):
    """Under a hybrid layout shards are reduced across replicas before they are reduced within one.

    After NVIDIA/Megatron-LM#3670: with overlapped reductions over several instances gradients came out wrong.
    """

    name = "mutant.ReducesReplicasBeforeTheScatter"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream between replicas wait for no other."""
        return _in_context(super().prepare(model, plan, mesh), _deaf("all_reduce_stream"))


class FreesTheReplicasBuffer(FullyShardEngine):
    """Under a hybrid layout that reduces in a dtype of its own, what replicas reduce is let go at once.

    After pytorch/pytorch#180665: memory of one stream was handed out again while another stream was reading it.
    """

    name = "mutant.FreesTheReplicasBuffer"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep no buffer across units."""

        def let_go(group: Any) -> None:
            group._all_reduce_state = None

        return _after_method(super().prepare(model, plan, mesh), "post_backward", let_go)


class GathersPartsBeforeTheyAreCut(FullyShardEngine):
    """What is kept between forward and backward for pairs of ranks is gathered before it was copied.

    After deepspeedai/DeepSpeed#8061: one of several streams that filled a buffer was not waited for.
    """

    name = "mutant.GathersPartsBeforeTheyAreCut"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then lose the event of each copy."""

        def lose_event(group: Any) -> None:
            group._reshard_after_forward_event = None

        return _after_method(super().prepare(model, plan, mesh), "reshard", lose_event)


# The insides of FSDP2 ---------------------------------------------------------------------------------------


class _Forgetful(list[Any]):
    """Inputs of reductions, without the events that tell when those have read them."""

    def append(self, state: Any) -> None:
        super().append(state._replace(event=None))


def _in_context(prepared: PreparedModel, sin: Callable[[Any], None]) -> PreparedModel:
    """Have ``sin`` done to what the units of a root share, as soon as it has streams."""
    for state in _states(prepared):
        context = state._comm_ctx
        context.lazy_init = _then(context.lazy_init, partial(sin, context))
    return prepared


def _after_method(prepared: PreparedModel, method: str, sin: Callable[[Any], None]) -> PreparedModel:
    """Have ``sin`` done to each group after each call of its method."""
    for group in _groups(prepared):
        setattr(group, method, _then(getattr(group, method), partial(sin, group)))
    return prepared


def _then(first: Callable[..., Any], second: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        second()
        return result

    return both


def _deaf(stream: str) -> Callable[[Any], None]:
    """Have this stream wait for no other; for single events it still does."""

    def sin(context: Any) -> None:
        getattr(context, stream).wait_stream = _ignore

    return sin


def _ignore(*_: Any) -> None:
    return None


def _states(prepared: PreparedModel) -> list[Any]:
    modules: list[Any] = list(prepared.module.modules())
    return list(dict.fromkeys(m._get_fsdp_state() for m in modules if hasattr(m, "_get_fsdp_state")))


def _groups(prepared: PreparedModel) -> list[Any]:
    return [group for state in _states(prepared) for group in state._fsdp_param_groups]
