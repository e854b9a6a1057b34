"""Mutants that gather, keep or free whole parameters at the wrong time; the numbers are right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.adapters.composable import ComposableUnit, PreparedComposable
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Capability, Grouping, Layout, Plan, Prefetch, PreparedModel, Reshard, Shard
from engine.mutants.fsdp2_insides import groups
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.patches import KeepingFsdp2, before, taking
from engine.mutants.plans import ON_BLOCKS

_WATCHED = frozenset({Capability.UNIT_STATE})


def _plan(reshard: Reshard, demands: frozenset[Capability] = _WATCHED) -> Plan:
    return Plan(layout=Layout.SHARD, grouping=Grouping.REQUIRED, reshard=reshard, demands=demands)


@mutant(
    after="pytorch/pytorch#154655", kills_on=Condition(plan=_plan(Reshard.AFTER_FORWARD)), trace=Trace.STATE
)
class KeepsRootsWhateverAsked(FullyShardEngine):
    """Roots stay gathered after forward although the plan says to free them.

    Reported: of every root it was assumed that backward would need it at once.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, PreparedFullyShard)
        if plan.reshard in {Reshard.AFTER_FORWARD, Reshard.TO_PAIRS}:
            for root in prepared._roots():
                root.set_reshard_after_forward(False, recurse=False)
        return prepared


@mutant(after="pytorch/PiPPy#1105", kills_on=Condition(plan=_plan(Reshard.KEEP)), trace=Trace.STATE)
class FreesWhatItWasAskedToKeep(FullyShardEngine):
    """Units are freed after forward although the plan says to keep them.

    Reported: beside a pipeline the policy had to be to free, although keeping was wanted.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_kept = plan.reshard is Reshard.KEEP
        return super().prepare(model, replace(plan, reshard=Reshard.AFTER_FORWARD) if is_kept else plan, mesh)


@mutant(
    after="pytorch/pytorch#149029", kills_on=Condition(plan=_plan(Reshard.AFTER_FORWARD)), trace=Trace.STATE
)
class KeepsWhatItWasAskedToFree(FullyShardEngine):
    """Units are kept after forward although the plan says to free them.

    Reported: freeing after forward was asked for, and memory grew with every forward.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_freed = plan.reshard is Reshard.AFTER_FORWARD
        return super().prepare(model, replace(plan, reshard=Reshard.KEEP) if is_freed else plan, mesh)


@mutant(after="ByteDance-Seed/VeOmni#806", kills_on=Condition(plan=_plan(Reshard.NATIVE)), trace=Trace.STATE)
class FreesTheRootByDefault(FullyShardEngine):
    """The root is freed after forward where nobody said so.

    Reported: a policy set on the root undid the default that keeps it until backward.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_native = plan.reshard is Reshard.NATIVE
        plan_of_all = replace(plan, reshard=Reshard.AFTER_FORWARD) if is_native else plan
        return super().prepare(model, plan_of_all, mesh)


@mutant(
    after="Tencent-Hunyuan/UniRL#410",
    kills_on=Condition(
        world_size=4, plan=_plan(Reshard.TO_PAIRS), because="two ranks are a pair, and all there are"
    ),
    trace=Trace.COMMUNICATION,
)
class FreesWholeWhereAPartWasAsked(FullyShardEngine):
    """Parameters are sharded over all ranks after forward, not over pairs.

    Reported: a mesh of two axes was asked for, and one over all ranks was used.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_part = plan.reshard is Reshard.TO_PAIRS
        return super().prepare(model, replace(plan, reshard=Reshard.AFTER_FORWARD) if is_part else plan, mesh)


@mutant(
    after="pytorch/pytorch#75892",
    kills_on=Condition(steps=2, plan=_plan(Reshard.AFTER_FORWARD)),
    trace=Trace.STATE,
)
class FreesInTheFirstStepAlone(ReferenceEngine):
    """From the second step on units stay gathered after forward.

    Reported: what one iteration had left gathered changed what the next one gathered.
    """

    class Prepared(PreparedReference):
        def step(self) -> None:
            super().step()
            for unit in self.units().values():
                unit.set_reshard_after_forward(is_on=False)


class _PreparedLeaky(PreparedReference):
    """Keeps what backward used, and frees it only when the optimizer needs the shards."""

    def backward(self, loss: torch.Tensor) -> None:
        for unit in self.units().values():
            unit.set_reshard_after_backward(is_on=False)
        super().backward(loss)

    def step(self) -> None:
        self._free()
        super().step()

    def local_gradients(self) -> Mapping[str, Shard | None]:
        # Gradients belong to the shards: whoever reads them frees the rest, as any reader of the engine would.
        self._free()
        return super().local_gradients()

    def _free(self) -> None:
        for unit in self.units().values():
            unit.reshard()


@mutant(
    after="hpcaitech/ColossalAI#741", kills_on=Condition(plan=_plan(Reshard.AFTER_FORWARD)), trace=Trace.STATE
)
class LeaksAfterBackward(ReferenceEngine):
    """Units stay gathered after backward until gradients are read.

    Reported: a sharded model's memory leaked in backward.
    """

    prepared_type = _PreparedLeaky


@mutant(
    after="pytorch/pytorch#83129",
    kills_on=Condition(
        plan=_plan(Reshard.KEEP, _WATCHED | {Capability.UNUSED}),
        because="where every unit gets gradients, every unit is freed",
    ),
    trace=Trace.STATE,
)
class FreesOnlyWhatGotGradients(ReferenceEngine):
    """Units that backward never entered stay gathered after it.

    Reported: the hook that frees a unit after backward fires with its gradients, or never.
    """

    class Prepared(_PreparedLeaky):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for name, unit in self.units().items():
                if any(p.grad is not None for p in self.part(name).parameters()):
                    unit.reshard()


class _UnheldUnit(ComposableUnit):
    def set_reshard_after_backward(self, *, is_on: bool) -> None:
        """Change nothing."""


@mutant(
    after="Haian-Jin/LVSM#22",
    kills_on=Condition(plan=_plan(Reshard.KEEP, _WATCHED | {Capability.KEEP_AFTER_BACKWARD})),
    trace=Trace.STATE,
)
class FreesHeldUnitsAfterBackward(ReferenceEngine):
    """Units are freed after backward although they were told to stay gathered.

    Reported: a switch thrown before each microbatch had no effect on what followed.
    """

    class Prepared(PreparedReference):
        unit_type = _UnheldUnit


@mutant(
    after="Lightning-AI/lightning-thunder#908",
    kills_on=Condition(plan=_plan(Reshard.KEEP)),
    trace=Trace.STATE,
)
class ShowsPaddedRows(ReferenceEngine):
    """Whole parameters end with rows of padding.

    Reported: in one order of wrapping, padding stayed in what was gathered.
    """

    class Prepared(PreparedReference):
        def shown_parameters(self) -> Mapping[str, Shard]:
            """Read whole parameters with the rows that were added so that all ranks have equally many."""
            shown = dict(super().shown_parameters())
            for name, parameter in self.named.named_parameters():
                if not isinstance(parameter, DTensor) and self.plan.layout is Layout.SHARD:
                    rows = shown[name].tensor
                    missing = -len(rows) % self._num_shards
                    padded = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
                    shown[name] = replace(shown[name], tensor=padded, global_shape=tuple(padded.shape))
            return shown

        @property
        def _num_shards(self) -> int:
            return torch.distributed.get_world_size()


# Any, throughout: FSDP2's insides have no public types.


class _FreesLate(PreparedComposable):
    """Keeps what backward gathers until all of it has run; to be mixed in."""

    def backward(self, loss: torch.Tensor) -> None:
        units = self.units().values()
        for unit in units:
            unit.set_reshard_after_backward(is_on=False)
        super().backward(loss)
        for unit in units:
            unit.reshard()


@mutant(after="pytorch/pytorch#95805", kills_on=ON_BLOCKS, trace=Trace.STATE)
class KeepsUnitsUntilBackwardEnds(FullyShardEngine):
    """Backward frees no unit before the last of them has run.

    Reported: what backward had gathered was not freed, and memory grew layer by layer.
    """

    class Prepared(_FreesLate, PreparedFullyShard):
        pass


@mutant(after="pytorch/pytorch#149029", kills_on=ON_BLOCKS, trace=Trace.STATE)
class KeepsGatherOutputs(FullyShardEngine):
    """The output of each gather is kept until the step.

    Reported: memory that was to be free after each layer's forward grew with every forward.
    """

    prepared_type = KeepingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        return taking(prepared, groups, before, "wait_for_unshard", _keep_output)


class _Remembering(PreparedComposable):
    """Keeps a copy of the first unit's whole parameters until that unit runs again; to be mixed in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copies: list[torch.Tensor] = []
        # First of the hooks: afterwards there are shards again.
        self.part(self.plan.units[0]).register_forward_hook(self._remember, prepend=True)

    def _remember(self, module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            whole = (p for p in module.parameters() if not isinstance(p, DTensor))
            self._copies = [parameter.detach().clone() for parameter in whole]


@mutant(after="pytorch/pytorch#75892", kills_on=ON_BLOCKS, trace=Trace.STATE)
class RemembersAUnit(FullyShardEngine):
    """Whole parameters of one unit are kept from step to step.

    Reported: what one iteration had left gathered changed what the next one gathered.
    """

    class Prepared(_Remembering, PreparedFullyShard):
        pass


@mutant(after="deepspeedai/DeepSpeed#1069", kills_on=ON_BLOCKS, trace=Trace.STATE)
class PrefetchesEverything(FullyShardEngine):
    """Each unit asks for the gathers of all that follow.

    Reported: which gathers were issued ahead was not what had been chosen.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return super().prepare(model, _unbounded(plan), mesh)


def _unbounded(plan: Plan) -> Plan:
    distance = len(plan.units)
    return replace(plan, prefetch=Prefetch.by_distance(plan.units, forward=distance, backward=distance))


def _keep_output(group: Any, kept: list[Any]) -> None:
    if group._all_gather_result is not None:
        kept.append(group._all_gather_result.all_gather_output)
