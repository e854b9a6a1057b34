"""More mutants of FSDP2 that each leave out one wait; those that came first are in `races`.

Which waits FSDP2 has, and which of them can be left out unseen, docs/waits.md tells.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.capability import Capability
from engine.contract import Plan, PreparedModel
from engine.mutants.fsdp2_insides import after_method, deaf_in, in_context, waits_without_own_event
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import SHARDED_BLOCKS

_BY_HAND = frozenset({Capability.UNIT_STATE, Capability.ASYNC_GATHER})


@mutant(
    after="NVIDIA/Megatron-LM#5788",
    kills_on=Condition(plan=SHARDED_BLOCKS, because="what forward kept is not gathered in backward"),
    trace=Trace.RACES,
)
class FreesTheGatherOutputInBackward(FullyShardEngine):
    """In backward the output of a gather is let go while it may be copied from.

    Reported: gathered memory was given back with neither an event nor record_stream.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have gathers not wait for the copy that has just been issued."""
        return waits_without_own_event(super().prepare(model, plan, mesh))


@mutant(
    after="NVIDIA/Megatron-LM#5788",
    kills_on=Condition(plan=SHARDED_BLOCKS, because="what forward kept is not gathered in backward"),
    trace=Trace.RACES,
)
class FreesTheLastGatherOutput(FullyShardEngine):
    """At the end of forward the output of a gather is let go while it may be copied from.

    Reported: gathered memory was given back with neither an event nor record_stream.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream of the copies in not wait where forward ends."""
        sin = deaf_in("all_gather_copy_in_stream", "wait_event", "_post_forward")
        return in_context(super().prepare(model, plan, mesh), sin)


@mutant(
    after="NVIDIA/Megatron-LM#4609",
    kills_on=Condition(
        steps=2,
        plan=replace(SHARDED_BLOCKS, demands=frozenset({Capability.STEP_EVENT})),
        because="nothing is written before the first step, and others give no event",
    ),
    trace=Trace.RACES,
)
class GathersBeforeTheEventOfTheStep(FullyShardEngine):
    """The first copy of an iteration does not wait for the event recorded after the optimizer.

    Reported: gathers that overlapped the step shared a buffer with what it was reading.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have the stream that reads the shards not wait for that event."""
        sin = deaf_in("all_gather_copy_in_stream", "wait_event", "_root_pre_forward")
        return in_context(super().prepare(model, plan, mesh), sin)


@mutant(
    after="NVIDIA/Megatron-LM#663",
    kills_on=Condition(
        plan=replace(SHARDED_BLOCKS, demands=_BY_HAND), because="other gathers are ordered by their streams"
    ),
    trace=Trace.RACES,
)
class ReadsAnAsyncGatherUnderWay(FullyShardEngine):
    """A gather asked for ahead by the caller is copied out of without a wait for its work.

    Reported: with gathers overlapped, forward read parameters that had not arrived.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then put something else in the place of each work."""

        def lose_work(group: Any) -> None:
            result = group._all_gather_result
            if result is not None and result.all_gather_work is not None:
                group._all_gather_result = result._replace(all_gather_work=_NO_WORK)

        return after_method(super().prepare(model, plan, mesh), "unshard", lose_work)


@mutant(after="NVIDIA/Megatron-LM#3670", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.RACES)
class RunsTheHookDuringTheReduction(FullyShardEngine):
    """An all-reduce hook runs without a wait for the reduction whose output it is given.

    Reported: with overlapped reductions over several instances gradients came out wrong.
    """

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
