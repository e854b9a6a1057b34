"""More mutants of FSDP2 that each leave out one wait; those that came first are in `races`.

Which waits FSDP2 has, and which of them can be left out unseen, docs/waits.md tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.contract import Plan, PreparedModel
from engine.mutants.fsdp2_insides import after_method, deaf_in, in_context, waits_without_own_event

__all__ = [
    "FreesTheGatherOutputInBackward",
    "FreesTheLastGatherOutput",
    "GathersBeforeTheEventOfTheStep",
    "ReadsAnAsyncGatherUnderWay",
    "RunsTheHookDuringTheReduction",
]


class FreesTheGatherOutputInBackward(FullyShardEngine):
    """In backward a gather's output is let go although the copy out of it may still be reading.

    After NVIDIA/Megatron-LM#5788: gathered memory was given back with neither an event nor record_stream.
    """

    name = "mutant.FreesTheGatherOutputInBackward"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have gathers not wait for the copy that has just been issued."""
        return waits_without_own_event(super().prepare(model, plan, mesh))


class FreesTheLastGatherOutput(FullyShardEngine):
    """At the end of forward the last gather's output is let go although the copy out of it may still be reading.

    After NVIDIA/Megatron-LM#5788: gathered memory was given back with neither an event nor record_stream.
    """

    name = "mutant.FreesTheLastGatherOutput"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream of the copies in not wait where forward ends."""
        sin = deaf_in("all_gather_copy_in_stream", "wait_event", "_post_forward")
        return in_context(super().prepare(model, plan, mesh), sin)


class GathersBeforeTheEventOfTheStep(FullyShardEngine):
    """The first gather of an iteration does not wait for the event that was recorded after the optimizer.

    After NVIDIA/Megatron-LM#4609: gathers that overlapped the step shared a buffer with what it was reading.
    """

    name = "mutant.GathersBeforeTheEventOfTheStep"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream that reads the shards not wait for that event."""
        sin = deaf_in("all_gather_copy_in_stream", "wait_event", "_root_pre_forward")
        return in_context(super().prepare(model, plan, mesh), sin)


class ReadsAnAsyncGatherUnderWay(FullyShardEngine):
    """A gather that the caller asked for ahead is copied out of without a wait for its work.

    After NVIDIA/Megatron-LM#663: with gathers overlapped, forward read parameters that had not arrived.
    """

    name = "mutant.ReadsAnAsyncGatherUnderWay"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then put something else in the place of each work."""

        def lose_work(group: Any) -> None:
            result = group._all_gather_result
            if result is not None and result.all_gather_work is not None:
                group._all_gather_result = result._replace(all_gather_work=_NO_WORK)

        return after_method(super().prepare(model, plan, mesh), "unshard", lose_work)


class RunsTheHookDuringTheReduction(FullyShardEngine):
    """An all-reduce hook of the caller's is run on its stream without a wait for the reduction before it.

    After NVIDIA/Megatron-LM#3670: with overlapped reductions over several instances gradients came out wrong.
    """

    name = "mutant.RunsTheHookDuringTheReduction"
    deaf_where = "foreach_reduce"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, add a hook that changes nothing, then have its stream wait for no other."""
        prepared = super().prepare(model, plan, mesh)
        # FSDP2 itself lets go of what a hook was given too early: that is no sin of this mutant.
        kept: list[torch.Tensor] = []

        def touch(gradients: torch.Tensor) -> None:
            kept.append(gradients.mul_(1))

        modules: list[Any] = [m for m in prepared.module.modules() if hasattr(m, "set_all_reduce_hook")]
        for module in modules:
            module.set_all_reduce_hook(touch)
        after_method(prepared, "finalize_backward", lambda _: kept.clear())
        return in_context(prepared, deaf_in("all_reduce_stream", "wait_stream", self.deaf_where))


_NO_WORK = object()  # FSDP2 asks whether there is any work, and then whether it is a Work
