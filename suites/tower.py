"""A model with units inside units for cases of engines' own interfaces: its data, and its training on one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# One unit inside another; the rest is the root's.
UNITS = ("middle", "middle.1")
LR = 0.25  # a power of two, so that steps by whole numbers are exact
_NUM_ROWS = 4


class Tower(nn.Module):
    """Linear throughout, of sizes that no world divides: integers stay integers."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "tower"
        self.stem = nn.Linear(3, 5)
        self.middle = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 5))
        self.head = nn.Linear(5, 1)
        self.offset: torch.Tensor
        self.scratch: torch.Tensor
        self.register_buffer("offset", torch.tensor([3.0]))
        self.register_buffer("scratch", torch.tensor([5, 7]), persistent=False)
        self.middle.register_buffer("calls", torch.tensor(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute one number a row."""
        result: torch.Tensor = self.head(self.middle(self.stem(rows))) + self.offset
        return result

    def describe(self, name: str) -> str:
        """A method of the kind that users write for their models."""
        return f"{self.kind} {name}"


def tower(dtype: torch.dtype = torch.float32) -> Tower:
    """Make the model, of small integers that are the same on every rank."""
    model = Tower()
    fill(model)
    return model.to(dtype)


def fill(module: nn.Module, seed: int = 0) -> None:
    """Set every parameter to small integers that differ from its neighbours'."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters(), start=seed):
            values = (torch.arange(parameter.numel()) * 7 + index * 3) % 5 - 2
            parameter.copy_(values.view(parameter.shape))


def blank() -> Tower:
    """Make a tower whose values are all wrong."""
    model = tower()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(9)
    return model


def batch(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make the rows of a rank in a step; they cancel for no number of ranks, or only roundings would be trained."""
    values = (torch.arange(_NUM_ROWS * 3) * 5 + rank * 3 + step * 4) % 7 - 2
    return values.view(_NUM_ROWS, 3).to(dtype)


def train_alone(model: nn.Module, ranks: Iterable[int], step: int = 0) -> None:
    """Accumulate in one process the gradients of these ranks' rows in a step, in a model that is not wrapped."""
    dtype = next(model.parameters()).dtype
    for rank in ranks:
        model(batch(rank, step, dtype)).sum().backward()


def gradients(model: nn.Module, ranks: Iterable[int], steps: Iterable[int] = (0,)) -> dict[str, torch.Tensor]:
    """Compute in one process the gradients that these ranks accumulate in these steps."""
    model.zero_grad()
    for step in steps:
        train_alone(model, ranks, step)
    return shown_gradients(model)


def trained_alone(
    ranks: Iterable[int], dtype: torch.dtype = torch.float32, *, lr: float = LR, steps: Iterable[int] = (0,)
) -> dict[str, torch.Tensor]:
    """Compute in one process the parameters after one step of SGD from the gradients of these ranks and steps."""
    model = tower(dtype)
    grads = gradients(model, ranks, steps)
    return {name: p.detach() - lr * grads[name] for name, p in model.named_parameters()}


def copies(named: Any) -> dict[str, torch.Tensor]:
    """Copy named tensors as they are now."""
    return {name: tensor.detach().clone().cpu() for name, tensor in named}


def gathered(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy named tensors as they are now, whole where they are sharded."""
    held = {name: tensor.detach() for name, tensor in named.items()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in held.items()}


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters of a model that is not wrapped."""
    return copies(model.named_parameters())


def shown_gradients(root: Any) -> dict[str, torch.Tensor]:
    """Copy the gradients in a model's parameters."""
    return {name: p.grad.detach().clone() for name, p in root.named_parameters() if p.grad is not None}


def shapes(root: Any) -> list[tuple[str, list[int]]]:
    """List the shapes of a module's current parameters, by name."""
    return [(name, list(p.shape)) for name, p in root.named_parameters()]
