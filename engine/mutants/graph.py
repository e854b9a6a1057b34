"""Mutants that are wrong about the graph of a forward, or about the order of what is in it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.contract import Plan, PreparedModel

__all__ = ["OrdersParametersByRank", "SearchesTheGraph", "TakesTheFirstGraphForAll"]


class TakesTheFirstGraphForAll(DistributedDataParallelEngine):
    """What the first iteration used is waited for in all others.

    After pytorch/pytorch#79171: with a graph declared static, an output that the loss did not use ended the
    second iteration.
    """

    name = "mutant.TakesTheFirstGraphForAll"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap with a promise that nobody gave."""
        plan.refuse_beyond(self.capabilities)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group(), static_graph=True)
        return self.prepared_type(ddp, named=model)


class SearchesTheGraph(DistributedDataParallelEngine):
    """Each forward's graph is searched for parameters that it does not use, and a recomputation is not in it yet.

    After pytorch/pytorch#24005: a parameter was marked ready by the search, and again by the backward inside a
    reentrant checkpoint.
    """

    name = "mutant.SearchesTheGraph"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap with a search that the plan did not ask for."""
        plan.refuse_beyond(self.capabilities)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group(), find_unused_parameters=True)
        return self.prepared_type(ddp, named=model)


class OrdersParametersByRank(FullyShardEngine):
    """The last rank packs the parameters of each layer in another order than the others; the sizes are the same.

    After pytorch/pytorch#64629: that gradients get ready in the same order on all ranks was assumed, and not made
    sure of.
    """

    name = "mutant.OrdersParametersByRank"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Turn the order of registration round on the last rank, then shard honestly."""
        if mesh.get_rank() == mesh.size() - 1 > 0:
            for module in model.modules():
                module._parameters = dict(reversed(module._parameters.items()))
        return super().prepare(model, plan, mesh)
