"""A chain of units that every test of an engine's methods shards, and gradients of one process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.reference import REFERENCE_API
from shardproof.engine.adapters.torch_fsdp2 import FSDP2_API
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.worlds.rank import RankContext

WIDTH = 8
ROOT = -1  # the index of the chain itself among its units


class Unit(nn.Module):
    """A square weight, and a vector whose length depends on ``index``: no two units have equal shapes."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) / 2)
        self.extra = nn.Parameter(torch.ones(4 * (index + 1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute something whose backward needs the weight."""
        return inputs @ self.weight + self.extra.sum()


class Chain(nn.Module):
    """Three units one after the other, and a vector that the root owns."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(index) for index in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            inputs = unit(inputs)
        return inputs * self.scale


def apply_to(chain: Chain, apply: Callable[..., Any], **options: Any) -> Any:
    """Shard or replicate each unit, then the root; Any because the engines share no base class."""
    for unit in chain.units:
        apply(unit, **options)
    return apply(chain, **options)


def hybrid_mesh(replicate: int, shard: int) -> DeviceMesh:
    """Make a mesh of replicas of shards."""
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def inputs_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw small whole numbers that differ over ranks, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, (2, WIDTH), generator=generator).to(dtype)


def train(context: RankContext, model: nn.Module, step: int = 0) -> None:
    """Run a labelled forward and backward on this rank's inputs."""
    with context.recorder.during(Phase.FORWARD, step=step):
        loss = model(inputs_of(context.rank)).sum()
    with context.recorder.during(Phase.BACKWARD, step=step):
        loss.backward()


def is_whole(module: nn.Module) -> bool:
    """Return whether a module's own parameters are registered as plain tensors."""
    kinds = {isinstance(param, DTensor) for param in module.parameters(recurse=False)}
    assert len(kinds) == 1, f"{type(module).__name__} has parameters of both kinds, or none"
    return kinds == {False}


def whole_units(chain: Chain) -> set[int]:
    """List the units, and the root, whose parameters are whole now."""
    return {index for index, unit in enumerate((chain, *chain.units), start=ROOT) if is_whole(unit)}


def mean_gradients(
    plain: nn.Module, ranks: Iterable[int], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Compute with one process the mean of these ranks' gradients; a rank's loss is the sum of its output."""
    plain.zero_grad()
    losses = [plain(inputs_of(rank, dtype)).sum() for rank in ranks]
    torch.stack(losses).mean().backward()
    return {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}


def chain_gradients(
    size: int, factor: float = 1, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Compute a chain's gradients over all ranks, times a factor."""
    means = mean_gradients(Chain().to(dtype), range(size), dtype)
    return {name: factor * gradient for name, gradient in means.items()}


def assert_gradients(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """Compare every gradient of a model in full, absences included."""
    __tracebackhide__ = True
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert sorted(found) == sorted(expected)
    for name, gradient in found.items():
        torch.testing.assert_close({name: gradient}, {name: expected[name]})  # the error names the key


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor if it is sharded, by a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


BY_NAME = {"reference": REFERENCE_API, "torch": FSDP2_API}
each_api = pytest.mark.parametrize("api", sorted(BY_NAME))
