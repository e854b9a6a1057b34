"""More mutants of the reference engine that each leave out one wait; those that came first are in `reference_races`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.reference import ReferenceEngine, ReferenceOnStreams
from engine.contract import Plan, PreparedModel
from engine.mutants.reference_insides import lanes_of, reference_groups
from engine.reference.lanes import InFlight, Lanes, Reduction

__all__ = [
    "FreesReducedOutputs",
    "GathersByHandBeforeTheWrite",
    "ReadsGathersUnderWay",
    "SendsPartsBeforeTheyAreCut",
    "TakesReductionsAsDone",
    "TakesTheSumOverReplicasAsDone",
]


class ReadsGathersUnderWay(ReferenceEngine):
    """Whole parameters are taken out of a gather's output without a wait for its work.

    After NVIDIA/Megatron-LM#663: with gathers overlapped, forward read parameters that had not arrived.
    """

    name = "mutant.ReadsGathersUnderWay"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then take each gather as done."""
        prepared = super().prepare(model, plan, mesh)
        for group in reference_groups(prepared):
            group._gathered = _unawaited(group)  # type: ignore[method-assign]  # of this one alone
        return prepared


class SendsPartsBeforeTheyAreCut(ReferenceEngine):
    """What is kept between forward and backward for pairs of ranks is gathered before it was cut.

    After deepspeedai/DeepSpeed#8061: one of several streams that filled a buffer was not waited for.
    """

    name = "mutant.SendsPartsBeforeTheyAreCut"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have gathers not wait where parts are kept."""
        return _gathers_freely_after("keep_part", super().prepare(model, plan, mesh))


class GathersByHandBeforeTheWrite(ReferenceEngine):
    """A gather that the caller asks for does not wait for what was written to the shards.

    After NVIDIA/Megatron-LM#4609: gathers that overlapped the step shared a buffer with what it was reading.
    """

    name = "mutant.GathersByHandBeforeTheWrite"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have gathers not wait where the caller asks for them."""
        return _gathers_freely_after("unshard", super().prepare(model, plan, mesh))


class TakesReductionsAsDone(ReferenceEngine):
    """Reduced gradients are used without a wait for the work of the reduce-scatter.

    After flagos-ai/Torch-FL#62: gradients were read while their reduction was under way on another stream.
    """

    name = "mutant.TakesReductionsAsDone"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then take the first collective of each reduction as done."""
        return _takes_as_done(0, super().prepare(model, plan, mesh))


class TakesTheSumOverReplicasAsDone(ReferenceEngine):
    """Under a hybrid layout gradients are used without a wait for the work of the all-reduce.

    After NVIDIA/Megatron-LM#3670: with overlapped reductions over several instances gradients came out wrong.
    """

    name = "mutant.TakesTheSumOverReplicasAsDone"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then take the second collective of each reduction as done."""
        return _takes_as_done(1, super().prepare(model, plan, mesh))


class FreesReducedOutputs(ReferenceOnStreams):
    """What a reduction writes is let go when the next one begins, though another stream may still read it.

    After pytorch/pytorch#180665: memory of one stream was handed out again while another stream was reading it.
    """

    name = "mutant.FreesReducedOutputs"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep outputs no longer than to the next reduction."""
        prepared = super().prepare(model, plan, mesh)
        for lanes in lanes_of(prepared):
            lanes.make_room = _forgetting(lanes)  # type: ignore[method-assign]  # of this one alone
        return prepared


class _Done:
    """In the place of a work: nothing is waited for."""

    def wait(self) -> bool:
        return True


def _unawaited(group: Any) -> Callable[[], torch.Tensor]:
    def gathered() -> torch.Tensor:
        gather, group._gather = group._gather, None
        output: torch.Tensor = gather.output
        return output

    return gathered


def _gathers_freely_after(function: str, prepared: PreparedModel) -> PreparedModel:
    """Have gathers not wait for the current stream where this function of the engine asks for it."""
    for lanes in lanes_of(prepared):
        lanes.gather_after = _deaf_in(function, lanes.gather_after)  # type: ignore[method-assign]  # as above
    return prepared


def _deaf_in(function: str, gather_after: Callable[..., None]) -> Callable[..., None]:
    def sometimes(*event: Any) -> None:
        if sys._getframe(1).f_code.co_name != function:
            gather_after(*event)

    return sometimes


def _takes_as_done(position: int, prepared: PreparedModel) -> PreparedModel:
    """Have nobody wait for the collective at this position of each reduction."""
    for lanes in lanes_of(prepared):
        lanes.reduce = _reducing(lanes, position)  # type: ignore[assignment,method-assign]  # as above
    return prepared


def _reducing(lanes: Lanes, position: int) -> Callable[[torch.Tensor, Reduction], None]:
    reduce = lanes.reduce

    def hasty(flat: torch.Tensor, reduction: Reduction) -> None:
        reduce(flat, _without_wait(reduction, position))

    return hasty


def _without_wait(reduction: Reduction, position: int) -> Reduction:
    done: Any = _Done()
    for index, in_flight in enumerate(reduction):
        yield InFlight(done, in_flight.output) if index == position else in_flight


def _forgetting(lanes: Lanes) -> Callable[[], None]:
    make_room = lanes.make_room

    def hasty() -> None:
        lanes._outputs.clear()
        make_room()

    return hasty
