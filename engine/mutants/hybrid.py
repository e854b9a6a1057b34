"""Mutants that sin under a hybrid layout alone, some on meshes of one shape alone; other plans get an honest engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Layout, Plan, PreparedModel, Replicas
from engine.mutants.accumulation import Forgetful
from engine.mutants.scale import PreparedTimid
from engine.mutants.synchronisation import PreparedWithoutAccumulation

__all__ = [
    "DividesOneReplicaTwice",
    "IgnoresTheDivideFactorOfSingles",
    "LosesMicrobatchesOfReplicas",
    "NeverSynchronisesReplicas",
    "NeverSynchronisesSingles",
    "ReducesReplicasEveryMicrobatch",
    "ShardsOverReplicas",
    "TransposesTheMesh",
]


class NeverSynchronisesReplicas(FullyShardEngine):
    """Under a hybrid layout each replica trains on its own data alone.

    After verl-project/verl#7493: hybrid sharding reduced over the shard axis only.
    """

    name = "mutant.NeverSynchronisesReplicas"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard on the shard axis as if there were no other."""
        return super().prepare(model, plan, mesh["shard"] if _is_hybrid(plan) else mesh)


class NeverSynchronisesSingles(FullyShardEngine):
    """As NeverSynchronisesReplicas, but only where every replica is a single rank: an (n, 1) mesh.

    After pytorch/pytorch#154888: with one rank to shard over, the strategy became one without shards, which
    reduced over the group of that one rank.
    """

    name = "mutant.NeverSynchronisesSingles"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Forget the other axis when the shard axis has one rank."""
        is_single = _is_hybrid(plan) and mesh["shard"].size() == 1
        return super().prepare(model, plan, mesh["shard"] if is_single else mesh)


class ShardsOverReplicas(FullyShardEngine):
    """Under a hybrid layout parameters are sharded over all ranks; the numbers are right.

    After Tencent-Hunyuan/UniRL#410: a hybrid layout was asked for, and what was built was a flat one.
    """

    name = "mutant.ShardsOverReplicas"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard over a mesh of one axis, as another plan would have it."""
        plan.refuse_beyond(self.capabilities)
        if _is_hybrid(plan):
            plan = replace(plan, layout=Layout.SHARD, replicas=Replicas.TWO)
            mesh = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("shard",))
        return super().prepare(model, plan, mesh)


class DividesOneReplicaTwice(FullyShardEngine):
    """On a (1, n) mesh gradients are divided by the number of shards a second time.

    After pytorch/torchtitan#2318: a change of loss normalisation reached some of the layouts that divided by
    the number of ranks, and not the others.
    """

    name = "mutant.DividesOneReplicaTwice"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; with one replica divide the loss as well."""
        is_one = _is_hybrid(plan) and mesh["replicate"].size() == 1
        module = super().prepare(model, plan, mesh).module
        return PreparedTimid(module, plan, divisor=mesh.size() if is_one else 1)


class TransposesTheMesh(FullyShardEngine):
    """The two axes of a hybrid mesh are mistaken for each other; the numbers are right.

    After pytorch/torchtitan#1483: on a mesh of two axes the order of placements was another than was meant.
    """

    name = "mutant.TransposesTheMesh"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard over the replicas, and replicate over the shards."""
        if _is_hybrid(plan):
            mesh = DeviceMesh(mesh.device_type, mesh.mesh.T, mesh_dim_names=("replicate", "shard"))
        return super().prepare(model, plan, mesh)


class IgnoresTheDivideFactorOfSingles(FullyShardEngine):
    """On an (n, 1) mesh gradients are averaged, whatever divisor was asked for.

    After pytorch/pytorch#167178: with a shard group of one rank the reduction returned before the division.
    """

    name = "mutant.IgnoresTheDivideFactorOfSingles"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; with one rank to shard over, under a plan without the factor."""
        is_single = _is_hybrid(plan) and mesh["shard"].size() == 1
        return super().prepare(model, replace(plan, divide_factor=None) if is_single else plan, mesh)


class ReducesReplicasEveryMicrobatch(FullyShardEngine):
    """As SynchronisesEveryMicrobatch, but under a hybrid layout alone, where it costs the most.

    After NVIDIA/cosmos-framework#161: with hybrid sharding every microbatch paid for the whole reduction.
    """

    name = "mutant.ReducesReplicasEveryMicrobatch"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; under a hybrid layout the way to accumulate does nothing."""
        return _under_hybrid(plan, super().prepare(model, plan, mesh), PreparedWithoutAccumulation)


class _PreparedForgetfulReplicas(Forgetful, PreparedFullyShard):
    pass


class LosesMicrobatchesOfReplicas(FullyShardEngine):
    """Under a hybrid layout only the last microbatch reaches the optimizer.

    After NVIDIA/Megatron-LM#7186: an adapter of a two-dimensional mesh had inherited a way to accumulate that
    did nothing.
    """

    name = "mutant.LosesMicrobatchesOfReplicas"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; under a hybrid layout each backward clears what was there."""
        return _under_hybrid(plan, super().prepare(model, plan, mesh), _PreparedForgetfulReplicas)


def _is_hybrid(plan: Plan) -> bool:
    return plan.layout is Layout.HYBRID


def _under_hybrid(
    plan: Plan, honest: PreparedModel, sinner: Callable[[nn.Module, Plan], PreparedModel]
) -> PreparedModel:
    return sinner(honest.module, plan) if _is_hybrid(plan) else honest
