"""Mutants that overlook how shards pack themselves for a gather."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.contract import Capability, FrontDoor
from shardproof.engine.mutants.mutant import Condition, Trace, mutant
from shardproof.engine.mutants.patches import after
from shardproof.engine.mutants.plans import demanding
from shardproof.engine.reference.fsdp_state import state_of
from shardproof.engine.reference.mesh import DataMesh

_PACKED = Condition(
    plan=demanding(Capability.COMPOSABLE, Capability.PACKED_GATHERS),
    because="shards pack themselves where a caller has asked for it alone",
)


class _PreparedPacking(PreparedReference):
    """Spoils how the parameters of what a caller shards are laid out."""

    # Any: modules gain methods, and options are the caller's.
    def composable(self) -> FrontDoor:
        door = super().composable()

        def fully_shard(module: Any, **options: Any) -> Any:
            module = door.fully_shard(module, **options)
            state = state_of(module if isinstance(module, nn.Module) else module[0])
            assert state is not None
            for group in state.param_groups:
                self.spoil_layout(group.layout)
            return module

        return replace(door, fully_shard=fully_shard)

    def spoil_layout(self, layout: Any) -> None:
        """Change the methods of a layout."""


@mutant(after="pytorch/torchtitan#3123", kills_on=_PACKED, trace=Trace.COMMUNICATION)
class GathersWithoutPacking(ReferenceEngine):
    """Shards are gathered as they are, although they pack themselves."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            layout.packs_itself = lambda parameter: False


@mutant(after="NVIDIA/Megatron-LM#663", kills_on=replace(_PACKED, steps=2))
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


@mutant(
    after="deepspeedai/DeepSpeed#5618",
    kills_on=replace(_PACKED, world_size=4, because="with two ranks there are no replicas of several shards"),
    trace=Trace.STATE,
)
class TellsPackTheWholeMesh(ReferenceEngine):
    """With replicas shards are told the whole mesh, not the axis that they are gathered along."""

    class Prepared(_PreparedPacking):
        def spoil_layout(self, layout: Any) -> None:
            mesh = layout._mesh
            layout._mesh = _Whole(**{field.name: getattr(mesh, field.name) for field in fields(mesh)})
