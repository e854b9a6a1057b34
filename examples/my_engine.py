"""A small data-parallel engine written by hand, and the adapter that plugs it in.

Judge it with ``shardproof run --engine examples/my_engine.py:MyEngine --world threads:4``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import Capability, Engine, Plan, PreparedModel


class AveragedReplicas:
    """The engine: replicas of one model, whose gradients are averaged over ``group`` after backward."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module = module
        self._group = group
        self._is_synchronising = True
        for tensor in (*module.parameters(), *module.buffers()):
            # Ranks may have been initialised differently; the first one's values count.
            dist.broadcast(tensor.detach(), group=group, group_src=0)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; outside `no_sync` average the gradients accumulated since the last average."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self._is_synchronising:
            self._average_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local in this context."""
        self._is_synchronising = False
        try:
            yield
        finally:
            self._is_synchronising = True

    def _average_gradients(self) -> None:
        # Where the loss did not reach a parameter this rank still takes part, with zeros: the others wait for it.
        gradients = [_gradient_or_zeros(p) for p in self.module.parameters() if p.requires_grad]
        # Issued together and waited for together, so that they overlap each other; none overlaps backward.
        works = [dist.all_reduce(gradient, group=self._group, async_op=True) for gradient in gradients]
        for gradient, work in zip(gradients, works, strict=True):
            work.wait()
            gradient.div_(dist.get_world_size(self._group))


def _gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class PreparedReplicas(PreparedModel):
    """The prepared model; parameters are plain tensors, so every read has a working default."""

    def __init__(self, engine: AveragedReplicas) -> None:
        super().__init__(engine.module)
        self._engine = engine

    def backward(self, loss: torch.Tensor) -> None:
        """Let the engine run backward, since that is when it communicates."""
        self._engine.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Use the engine's own context."""
        return self._engine.no_sync()


class MyEngine(Engine):
    """The adapter."""

    name = "my.engine"
    capabilities = frozenset({Capability.REPLICATE, Capability.ACCUMULATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate the model; refuse all other options of the plan."""
        plan.refuse_beyond(self.capabilities)
        return PreparedReplicas(AveragedReplicas(model, mesh.get_group()))
