"""Mutants that are wrong about the graph of a forward, or about the order of what is in it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.capability import Capability
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, Trace, mutant


@mutant(
    after="pytorch/pytorch#79171",
    kills_on=Condition(
        world_size=1,
        steps=3,
        plan=Plan(demands=frozenset({Capability.UNUSED})),
        because="needs parameters that a later step does without",
    ),
    trace=Trace.CRASH,
)
class TakesTheFirstGraphForAll(DistributedDataParallelEngine):
    """What the first iteration used is waited for in all others.

    Reported: with a graph declared static, an output that the loss did not use ended the second iteration.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap with a promise that nobody gave."""
        plan.refuse_beyond(self.capabilities)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group(), static_graph=True)
        return self.prepared_type(ddp, named=model)


@mutant(
    after="pytorch/pytorch#24005",
    kills_on=Condition(world_size=1, because="needs a reentrant checkpoint"),
    trace=Trace.CRASH,
)
class SearchesTheGraph(DistributedDataParallelEngine):
    """Each forward's graph is searched for what it does not use.

    Reported: a parameter was marked ready by the search, and again by the backward inside a reentrant checkpoint.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap with a search that the plan did not ask for."""
        plan.refuse_beyond(self.capabilities)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group(), find_unused_parameters=True)
        return self.prepared_type(ddp, named=model)


@mutant(after="pytorch/pytorch#64629", kills_on=Condition(because="a lone rank agrees with itself"))
class OrdersParametersByRank(FullyShardEngine):
    """The last rank packs the parameters of each layer in another order than the others.

    Reported: that gradients get ready in the same order on all ranks was assumed, and not made sure of.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Turn the order of registration round on the last rank, then shard honestly."""
        if mesh.get_rank() == mesh.size() - 1 > 0:
            for module in model.modules():
                module._parameters = dict(reversed(module._parameters.items()))
        return super().prepare(model, plan, mesh)
