"""The contract between the harness and an engine: one method to write, defaults for the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.capability import Capability, MissingMethodError, UnsupportedError
from engine.plan import Accumulation, Axis, Grouping, Layout, Plan, Replicas, Reshard
from engine.shard import Shard, shard_of

__all__ = [
    "Accumulation",
    "Axis",
    "Capability",
    "Engine",
    "Grouping",
    "Layout",
    "MissingMethodError",
    "OptimizerFactory",
    "Plan",
    "PreparedModel",
    "Replicas",
    "Reshard",
    "Shard",
    "UnsupportedError",
    "shard_of",
]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class PreparedModel:
    """A model in an engine's hands: what the training loop drives and what the harness reads.

    ``module`` is called for forward. ``named`` is the module whose parameter and buffer names are those
    of the original model; give it when ``module`` is a wrapper that prefixes them. Every method has a
    default that is right for engines whose parameters are plain tensors or DTensors.
    """

    def __init__(self, module: nn.Module, *, named: nn.Module | None = None) -> None:
        self.module = module
        self.named = module if named is None else named
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        """Run forward on this rank's microbatch."""
        return self.module(*inputs)

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build the optimizer over the parameters that this rank owns."""
        self._optimizer = factory(self.named.parameters())

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from a scalar loss."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def step(self) -> None:
        """Update the parameters from the gradients; must not clear the gradients."""
        self._built_optimizer().step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients before the next step."""
        self._built_optimizer().zero_grad(set_to_none=set_to_none)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context around forward and backward of every microbatch but the last: no gradient sync."""
        raise MissingMethodError("accumulating", Capability.ACCUMULATE)

    def local_parameters(self) -> Mapping[str, Shard]:
        """Read this rank's shard of every parameter, under the original names; never communicates."""
        return {name: shard_of(p) for name, p in self.named.named_parameters()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read this rank's shard of every gradient, None where there is none; never communicates."""
        return {
            name: None if p.grad is None else shard_of(p.grad) for name, p in self.named.named_parameters()
        }

    def local_buffers(self) -> Mapping[str, Shard]:
        """Read this rank's buffers under the original names; never communicates."""
        return {name: shard_of(b) for name, b in self.named.named_buffers()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read this rank's optimizer state as ``parameter/key``; never communicates."""
        state = self._built_optimizer().state
        return {
            f"{name}/{key}": shard_of(value)
            for name, p in self.named.named_parameters()
            for key, value in state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _built_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise RuntimeError("PreparedModel: expected optimizer(factory) before step or zero_grad")
        return self._optimizer


class Engine(ABC):
    """An adapter: the few lines that plug an engine in."""

    name: str
    capabilities: frozenset[Capability]

    @abstractmethod
    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Put ``model`` in the engine's hands on this rank, as ``plan`` asks.

        Must refuse, by raising, whatever it cannot honour: ``plan.refuse_beyond(self.capabilities)`` does so
        for every capability that the adapter does not declare.
        """

    def version(self) -> str:
        """Name the engine's release, for the record."""
        return f"torch {torch.__version__}"
