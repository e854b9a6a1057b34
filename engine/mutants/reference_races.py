"""Mutants of the reference engine whose streams do not wait, as those of FSDP2 in `races`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.reference import ReferenceEngine, ReferenceOnStreams
from engine.contract import Plan, PreparedModel
from engine.mutants.reference_insides import lanes_of, reference_groups
from engine.reference.group import Group

__all__ = [
    "FreesTheCopiedBuffer",
    "GathersWhileTheStepWrites",
    "ReducesBeforeTheCut",
    "RefillsTheReduceInput",
    "StepsWhileGradientsAreReduced",
]


class ReducesBeforeTheCut(ReferenceEngine):
    """Gradients are sent before they are laid out: the stream that sends waits for nobody.

    After deepspeedai/DeepSpeed#7898: the stream that reduced waited for another stream than that of backward.
    """

    name = "mutant.ReducesBeforeTheCut"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have that stream wait for no other."""
        prepared = super().prepare(model, plan, mesh)
        for lanes in lanes_of(prepared):
            lanes._scatter_stream.wait_stream = _ignore
        return prepared


class GathersWhileTheStepWrites(ReferenceEngine):
    """A forward's first gather does not wait for the optimizer.

    After NVIDIA/Megatron-LM#663: with overlapped gathering, forward read parameters of the step before.
    """

    name = "mutant.GathersWhileTheStepWrites"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then ignore what is to be waited for when an iteration begins."""
        prepared = super().prepare(model, plan, mesh)
        for lanes in lanes_of(prepared):
            lanes.gather_after = _unless_given(lanes.gather_after)  # type: ignore[method-assign]  # of this one alone
        return prepared


class FreesTheCopiedBuffer(ReferenceEngine):
    """The buffer of a gather is let go before the copy out of it is over.

    After NVIDIA/Megatron-LM#5788: gathered memory was given back with neither an event nor record_stream.
    """

    name = "mutant.FreesTheCopiedBuffer"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the gather after each copy wait for what was before it alone."""
        prepared = super().prepare(model, plan, mesh)
        for group in reference_groups(prepared):
            group.wait = _without_gather_after(group, group.wait)  # type: ignore[method-assign]  # as above
        return prepared


class RefillsTheReduceInput(ReferenceOnStreams):
    """The input of a reduction is let go when the next one begins, whether or not it was read by then.

    After deepspeedai/DeepSpeed#7188: one of two buffers was filled again before its reduction had finished.
    """

    name = "mutant.RefillsTheReduceInput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then make room without a wait."""
        prepared = super().prepare(model, plan, mesh)
        for lanes in lanes_of(prepared):
            lanes.make_room = lanes._inputs.clear  # type: ignore[method-assign]  # as above
        return prepared


class StepsWhileGradientsAreReduced(ReferenceOnStreams):
    """Backward ends without a wait for the reductions that it started.

    After flagos-ai/Torch-FL#62: gradients were read while their reduction was under way on another stream.
    """

    name = "mutant.StepsWhileGradientsAreReduced"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the end of backward do nothing."""
        prepared = super().prepare(model, plan, mesh)
        for lanes in lanes_of(prepared):
            lanes.finish = _ignore  # type: ignore[method-assign]  # as above
        return prepared


def _unless_given(gather_after: Callable[..., None]) -> Callable[..., None]:
    """Ignore the calls that name an event, or say that there is none: those at the start of an iteration."""

    def sometimes(*event: Any) -> None:
        if not event:
            gather_after()

    return sometimes


def _without_gather_after(group: Group, wait: Callable[[], None]) -> Callable[[], None]:
    def hasty() -> None:
        lanes: Any = group.lanes
        lanes.gather_after = _ignore
        try:
            wait()
        finally:
            del lanes.gather_after  # the class's own again

    return hasty


def _ignore(*_: Any) -> None:
    return None
