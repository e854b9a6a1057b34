"""pipegoose: DataParallel, by itself and with its DistributedOptimizer, which is ZeRO-1 with whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from pipegoose.distributed.parallel_context import ParallelContext
from pipegoose.distributed.parallel_mode import ParallelMode
from pipegoose.nn.data_parallel.data_parallel import DataParallel
from pipegoose.optim.zero.optim import DistributedOptimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import (
    Capability,
    Cut,
    Engine,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Shard,
    shard_of,
)


class _Context(ParallelContext):  # type: ignore[misc]  # of an untyped package
    """Uses the existing process group."""

    def init_global_dist(self, rank: int, world_size: int, *_: object) -> None:
        self._register_dist(rank, world_size, dist.group.WORLD, list(range(world_size)), ParallelMode.GLOBAL)
        self.add_global_rank(ParallelMode.GLOBAL, rank)


class PreparedPipegooseZero1(PreparedModel):
    """Each parameter is updated on one rank, which sends it to the others."""

    cut = Cut.PARAMETERS

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        super().__init__(model)
        self._context = context

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Pass the optimizer of all parameters, of whose groups this rank keeps its share."""
        super().optimizer(lambda given: DistributedOptimizer(factory(given), self._context))

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear gradients, always to None."""
        self._zero().zero_grad()

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read the state of this rank's parameters from the inner optimizer."""
        state = self._zero().optim.state
        return {
            f"{name}/{key}": shard_of(value)
            for name, p in self.owned_parameters().items()
            for key, value in state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _zero(self) -> Any:  # Any: it is not one of torch's optimizers
        return self.built_optimizer()


class PipegooseDdpEngine(Engine):
    """A hook on each parameter averages its gradient, by a blocking all-reduce of its own."""

    name = "pipegoose.ddp"
    package = "pipegoose"
    preload = (__name__,)
    capabilities = frozenset(
        {Capability.REPLICATE, Capability.CLIP, Capability.UNUSED, Capability.OWN_BUFFERS}
    )

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Hook the parameters."""
        plan.refuse_beyond(self.capabilities)
        return PreparedModel(DataParallel(model, _context()).parallelize())


class PipegooseZero1Engine(Engine):
    """The same, with the optimizer that shards its state."""

    name = "pipegoose.zero1"
    package = "pipegoose"
    preload = (__name__,)
    capabilities = frozenset({Capability.ZERO1, Capability.UNUSED, Capability.OWN_BUFFERS})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Hook the parameters; the optimizer comes later."""
        plan.refuse_beyond(self.capabilities)
        context = _context()
        return PreparedPipegooseZero1(DataParallel(model, context).parallelize(), context)


def _context() -> ParallelContext:
    size = dist.get_world_size()
    return _Context(
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        world_size=size,
        local_world_size=size,
        host="",
        port=0,
        seed=0,
        backend="gloo",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=size,
    )
