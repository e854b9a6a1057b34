"""Mutants whose fault needs a hybrid layout, some a mesh of one shape; under other plans the engine is correct."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Layout, Plan, PreparedModel, Replicas
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import dividing_losses, holding_nothing_back


@mutant(after="verl-project/verl#7493")
class NeverSynchronisesReplicas(FullyShardEngine):
    """Gradients are reduced within a replica, never between replicas."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return super().prepare(model, plan, mesh["shard"] if _is_hybrid(plan) else mesh)


@mutant(after="pytorch/pytorch#154888")
class NeverSynchronisesSingles(FullyShardEngine):
    """If each replica is a single rank, its gradients are not reduced."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_single = _is_hybrid(plan) and mesh["shard"].size() == 1
        return super().prepare(model, plan, mesh["shard"] if is_single else mesh)


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.COMMUNICATION)
class ShardsOverReplicas(FullyShardEngine):
    """Under a hybrid layout parameters are sharded over all ranks."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        if _is_hybrid(plan):
            plan = replace(plan, layout=Layout.SHARD, replicas=Replicas.TWO)
            mesh = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("shard",))
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/torchtitan#2318")
class DividesOneReplicaTwice(FullyShardEngine):
    """If there is one replica, gradients are divided by the number of its shards a second time."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_one = _is_hybrid(plan) and mesh["replicate"].size() == 1
        return dividing_losses(super().prepare(model, plan, mesh), mesh.size() if is_one else 1)


@mutant(after="pytorch/torchtitan#1483", trace=Trace.COMMUNICATION)
class TransposesTheMesh(FullyShardEngine):
    """A hybrid layout shards over its replicas and replicates over its shards."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if _is_hybrid(plan):
            mesh = DeviceMesh(mesh.device_type, mesh.mesh.T, mesh_dim_names=("replicate", "shard"))
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#167178")
class IgnoresTheDivideFactorOfSingles(FullyShardEngine):
    """If each replica is a single rank, gradients are averaged although another divisor was set."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_single = _is_hybrid(plan) and mesh["shard"].size() == 1
        return super().prepare(model, replace(plan, divide_factor=None) if is_single else plan, mesh)


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class ReducesReplicasEveryMicrobatch(FullyShardEngine):
    """Under a hybrid layout gradients are reduced after each microbatch although the plan accumulates."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        return holding_nothing_back(prepared) if _is_hybrid(plan) else prepared


def _is_hybrid(plan: Plan) -> bool:
    return plan.layout is Layout.HYBRID
