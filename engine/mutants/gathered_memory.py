"""Mutants that gather, keep, free or pack whole parameters wrongly; most numbers are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.composable import ComposableUnit
from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import (
    Layout,
    Plan,
    PreparedModel,
    Reshard,
    Shard,
    UnitHandle,
)
from shardproof.engine.mutants.fsdp2_insides import before_method, keeping, reference_units
from shardproof.engine.mutants.fsdp2_interface import OwnFullyShard, groups_of
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import KeepingFsdp2, after, in_each
from shardproof.engine.reference.extensions import has_extension
from shardproof.engine.reference.fsdp_state import FSDPState
from shardproof.engine.reference.mesh import DataMesh
from shardproof.engine.reference.parameter import ShardedParam


def _instead(plan: Plan, asked: Reshard, done: Reshard) -> Plan:
    return replace(plan, reshard=done) if plan.reshard is asked else plan


@mutant(after="pytorch/pytorch#154655", trace=Trace.STATE)
class KeepsRootsWhateverAsked(FullyShardEngine):
    """Roots stay gathered after forward although the plan frees them."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, PreparedFullyShard)
        if plan.reshard in {Reshard.AFTER_FORWARD, Reshard.TO_PAIRS}:
            for root in prepared._roots():
                root.set_reshard_after_forward(False, recurse=False)
        return prepared


@mutant(after="pytorch/PiPPy#1105", trace=Trace.STATE)
class FreesWhatItWasAskedToKeep(FullyShardEngine):
    """Units are freed after forward although the plan keeps them."""

    misreads = partial(_instead, asked=Reshard.KEEP, done=Reshard.AFTER_FORWARD)


@mutant(after="pytorch/pytorch#149029", trace=Trace.STATE)
class KeepsWhatItWasAskedToFree(FullyShardEngine):
    """Units are kept after forward although the plan frees them."""

    misreads = partial(_instead, asked=Reshard.AFTER_FORWARD, done=Reshard.KEEP)


@mutant(after="ByteDance-Seed/VeOmni#806", trace=Trace.STATE)
class FreesTheRootByDefault(FullyShardEngine):
    """The root is freed after forward if no policy requests it."""

    misreads = partial(_instead, asked=Reshard.NATIVE, done=Reshard.AFTER_FORWARD)


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.COMMUNICATION)
class FreesWholeWhereAPartWasAsked(FullyShardEngine):
    """Parameters are sharded over all ranks after forward, not over pairs."""

    misreads = partial(_instead, asked=Reshard.TO_PAIRS, done=Reshard.AFTER_FORWARD)


@mutant(after="pytorch/pytorch#75892", trace=Trace.STATE)
class FreesInTheFirstStepAlone(ReferenceEngine):
    """From the second step on units stay gathered after forward."""

    class Prepared(PreparedReference):
        def step(self) -> None:
            super().step()
            for unit in self.units().values():
                unit.set_reshard_after_forward(is_on=False)


class _PreparedLeaky(PreparedReference):
    """Keeps the parameters that backward used, and frees them only when the optimizer needs the shards."""

    def backward(self, loss: torch.Tensor) -> None:
        for unit in self.units().values():
            unit.set_reshard_after_backward(is_on=False)
        super().backward(loss)

    def step(self) -> None:
        self._free()
        super().step()

    def local_gradients(self) -> Mapping[str, Shard | None]:
        # Gradients belong to the shards: reading them frees the rest, as with any reader of the engine.
        self._free()
        return super().local_gradients()

    def _free(self) -> None:
        for unit in self.units().values():
            unit.reshard()


@mutant(after="hpcaitech/ColossalAI#741", trace=Trace.STATE)
class LeaksAfterBackward(ReferenceEngine):
    """Units stay gathered after backward until gradients are read."""

    prepared_type = _PreparedLeaky


@mutant(after="pytorch/pytorch#83129", trace=Trace.STATE)
class FreesOnlyWhatGotGradients(ReferenceEngine):
    """Units that backward never entered stay gathered after it."""

    class Prepared(_PreparedLeaky):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for name, unit in self.units().items():
                if any(p.grad is not None for p in self.part(name).parameters()):
                    unit.reshard()


@mutant(after="deepspeedai/DeepSpeed#8130", trace=Trace.STATE)
class KeepsPartlyFrozenUnits(ReferenceEngine):
    """A unit of which a part is frozen stays gathered from its first backward until the optimizer needs the shards."""

    class Prepared(_PreparedLeaky):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for name, unit in self.units().items():
                trains = {p.requires_grad for p in self.part(name).parameters(recurse=bool(name))}
                if trains != {True, False}:
                    unit.reshard()


@mutant(after="Haian-Jin/LVSM#22", trace=Trace.STATE)
class FreesHeldUnitsAfterBackward(ReferenceEngine):
    """Units are freed after backward although they were set to stay gathered."""

    class Unit(ComposableUnit):
        def set_reshard_after_backward(self, *, is_on: bool) -> None:
            """Change nothing."""


@mutant(after="Lightning-AI/lightning-thunder#908", trace=Trace.STATE)
class ShowsPaddedRows(ReferenceEngine):
    """Whole parameters end with rows of padding."""

    class Prepared(PreparedReference):
        def shown_parameters(self) -> Mapping[str, Shard]:
            shown = dict(super().shown_parameters())
            for name, parameter in self.named.named_parameters():
                if not isinstance(parameter, DTensor) and self.plan.layout is Layout.SHARD:
                    rows = shown[name].tensor
                    missing = -len(rows) % torch.distributed.get_world_size()
                    padded = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
                    shown[name] = replace(shown[name], tensor=padded, global_shape=tuple(padded.shape))
            return shown


class _FreeingAtTheEnd(PreparedFullyShard):
    """Frees units once backward is over; a base class."""

    def freed_late(self) -> list[UnitHandle]:
        return [*self.units().values()]

    def backward(self, loss: torch.Tensor) -> None:
        units = self.freed_late()
        for unit in units:
            unit.set_reshard_after_backward(is_on=False)
        super().backward(loss)
        for unit in units:
            unit.reshard()


@mutant(after="pytorch/pytorch#95805", trace=Trace.STATE)
class KeepsUnitsUntilBackwardEnds(FullyShardEngine):
    """Backward frees no unit before the last of them has run."""

    prepared_type = _FreeingAtTheEnd


@mutant(after="deepspeedai/DeepSpeed#3378", trace=Trace.STATE)
class KeepsFrozenUnitsUntilBackwardEnds(FullyShardEngine):
    """Backward frees no unit of which nothing trains before the last unit has run."""

    class Prepared(_FreeingAtTheEnd):
        def freed_late(self) -> list[UnitHandle]:
            trained = {n.rpartition(".")[0] for n, p in self.named.named_parameters() if p.requires_grad}
            return [
                unit
                for name, unit in self.units().items()
                if not any(f"{module}.".startswith(f"{name}.") for module in trained)
            ]


def _keep_until_the_last(_: FSDPState) -> Callable[..., None]:
    return lambda **_: None


@mutant(after="pytorch/pytorch#136861", trace=Trace.STATE)
class KeepsUnitsForEarlierForwards(ReferenceEngine):
    """Where several forwards go backward at once, a unit stays gathered until backward is through with all of them."""

    spoil = in_each(reference_units, "_end_one_forward", _keep_until_the_last)


def _keep_output(kept: list[Any], group: Any) -> None:
    if group._all_gather_result is not None:
        kept.append(group._all_gather_result.all_gather_output)


@mutant(after="pytorch/pytorch#149029", trace=Trace.STATE)
class KeepsGatherOutputs(FullyShardEngine):
    """The output of each gather is kept until the step."""

    prepared_type = KeepingFsdp2
    spoil = keeping(before_method, "wait_for_unshard", _keep_output)


class _PreparedPacking(OwnFullyShard):
    """Changes the layout of the parameters that a caller shards."""

    # Any: modules gain methods, and layouts are of two classes.
    def spoil_module(self, module: Any) -> None:
        for group in groups_of(module):
            self.spoil_layout(group.layout)

    def spoil_layout(self, layout: Any) -> None:
        """Change the methods of a layout."""


@mutant(after="pytorch/torchtitan#3123", trace=Trace.COMMUNICATION)
class GathersWithoutPacking(ReferenceEngine):
    """Shards are gathered unpacked, although they define how to pack."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            layout.packs_itself = lambda parameter: False


@mutant(after="pytorch/pytorch#197827", trace=Trace.RACES)
class PacksWhereNoGatherWaits(ReferenceEngine):
    """Shards pack themselves on the current stream, and the stream of gathers does not wait for it."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            layout.init_unsharded = partial(_packing_anywhere, layout.init_unsharded)


def _packing_anywhere(init_unsharded: Any, **options: Any) -> Any:
    return init_unsharded(**{**options, "where_gathers_start": nullcontext})


@mutant(after="pytorch/pytorch#169349", trace=Trace.STATE)
class KeepsWhatWasUnpacked(ReferenceEngine):
    """Gathered buffers are kept after unpacking, whatever the shard requests."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            layout.packs_itself = _ask_nothing


def _ask_nothing(parameter: ShardedParam) -> bool:
    vars(parameter.local).pop("fsdp_should_release_all_gather_outputs_after_post_all_gather", None)
    return has_extension(parameter)


@mutant(after="NVIDIA/Megatron-LM#663", phase="gather")
class PacksOnceForAll(ReferenceEngine):
    """Every gather sends what was packed for the first."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            after(layout, "init_unsharded", _keep_payloads)


def _keep_payloads(layout: Any) -> None:
    for extension in layout._extensions.values():
        payloads = extension.take()
        extension.take = lambda payloads=payloads: payloads


class _Whole(DataMesh):
    @property
    def axis_of_shards(self) -> DeviceMesh:
        return self.mesh


@mutant(after="deepspeedai/DeepSpeed#5618", trace=Trace.STATE)
class TellsPackTheWholeMesh(ReferenceEngine):
    """With replicas shards receive the whole mesh, not the axis along which they are gathered."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            mesh = layout._mesh
            layout._mesh = _Whole(**{field.name: getattr(mesh, field.name) for field in fields(mesh)})
