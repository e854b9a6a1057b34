"""Mutants that ignore how shards pack themselves for a gather."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.mutants.fsdp2_interface import OwnFullyShard, groups_of
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import after
from shardproof.engine.reference.extensions import has_extension
from shardproof.engine.reference.mesh import DataMesh
from shardproof.engine.reference.parameter import ShardedParam


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


@mutant(after="pytorch/pytorch#169349", trace=Trace.STATE)
class KeepsWhatWasUnpacked(ReferenceEngine):
    """Gathered buffers are kept after unpacking, whatever the shard requests."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            layout.packs_itself = _ask_nothing


def _ask_nothing(parameter: ShardedParam) -> bool:
    vars(parameter.local).pop("fsdp_should_release_all_gather_outputs_after_post_all_gather", None)
    return has_extension(parameter)


@mutant(after="NVIDIA/Megatron-LM#663")
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
