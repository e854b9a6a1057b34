"""What exercises work on: a small model with units inside units, its data, and how it is wrapped and trained alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from shardproof import InterfaceBench
from suites.wrapper.exercises.wrapped import wrap

__all__ = [
    "ROWS",
    "UNITS",
    "WRAPPED",
    "Form",
    "Tower",
    "Wrapping",
    "batch",
    "copies",
    "gradients",
    "mean_loss",
    "parameters",
    "summoned",
    "tower",
    "train",
    "trained_alone",
    "wrapped",
]

# One unit inside another; what is left is the root's.
UNITS = ("middle", "middle.1")
ROWS = 4
# What the wrapper adds to names; the names of the model itself have no such component.
WRAPPED = "_fsdp_wrapped_module"


class Form(Enum):
    """In what form a wrapped model shows its parameters to an optimizer."""

    ORIGINAL = "by name"
    FLAT = "one for each unit"

    @property
    def use_orig_params(self) -> bool:
        """Give the option of the wrapper."""
        return self is Form.ORIGINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """One of the ways to wrap a model; ``by_mesh`` hands the engine a mesh of all ranks and not their group."""

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    form: Form = Form.ORIGINAL
    units: tuple[str, ...] = UNITS
    by_mesh: bool = False

    def wrap(self, bench: InterfaceBench, model: nn.Module) -> Any:
        """Wrap a model in this way."""
        options: dict[str, Any] = {
            "sharding_strategy": self.strategy,
            "use_orig_params": self.form.use_orig_params,
        }
        if self.strategy is ShardingStrategy.HYBRID_SHARD:
            shape = (1, bench.size) if bench.size % 2 else (bench.size // 2, 2)
            names = ("replicate", "shard")
            options["device_mesh"] = init_device_mesh(bench.device.type, shape, mesh_dim_names=names)
        elif self.by_mesh:
            options["device_mesh"] = init_device_mesh(bench.device.type, (bench.size,))
        return wrapped(bench, model, self.units, **options)

    @property
    def is_sharded(self) -> bool:
        """Tell whether several ranks have a share each."""
        return self.strategy is not ShardingStrategy.NO_SHARD

    def __str__(self) -> str:
        """Name it in the id of a case."""
        units = "-".join(self.units) or "root"
        return f"{self.strategy.name.lower()}-{self.form.name.lower()}-{units}" + "-mesh" * self.by_mesh


class Tower(nn.Module):
    """Linear throughout, of sizes that no world divides: of integers it makes integers."""

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
        """Give one number a row."""
        result: torch.Tensor = self.head(self.middle(self.stem(rows))) + self.offset
        return result

    def describe(self, name: str) -> str:
        """Stand for the methods that users give their models."""
        return f"{self.kind} {name}"


def tower(dtype: torch.dtype = torch.float32) -> Tower:
    """Make the model, of small integers that are the same on every rank."""
    model = Tower()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            values = (torch.arange(parameter.numel()) * 7 + index * 3) % 5 - 2
            parameter.copy_(values.view(parameter.shape))
    return model.to(dtype)


def batch(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make the rows of a rank in a step; they cancel on no number of ranks, or only roundings would be learnt."""
    return ((torch.arange(ROWS * 3) * 5 + rank * 3 + step * 4) % 7 - 2).view(ROWS, 3).to(dtype)


def mean_loss(output: torch.Tensor, size: int) -> torch.Tensor:
    """Weigh the loss so that its mean over ranks is a sum of integers: exact in every world."""
    return output.sum() * size


def wrapped(bench: InterfaceBench, model: nn.Module, units: tuple[str, ...] = UNITS, **options: Any) -> Any:
    """Wrap the units and the model; ``options`` are the wrapper's own, with original parameters by default."""
    chosen = {model.get_submodule(name) for name in units}
    # A policy refuses a model that has wrapped units already.
    policy = bench.names.CustomPolicy(lambda module: module in chosen) if chosen else None
    return wrap(bench, model, auto_wrap_policy=policy, **options)


def train(
    bench: InterfaceBench, root: Any, step: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Take this rank's rows of a step forward and backward; gives the output."""
    output: torch.Tensor = root(batch(bench.rank, step, dtype))
    mean_loss(output, bench.size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


def summoned(bench: InterfaceBench, root: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Copy whole parameters, by name."""
    with bench.names.FullyShardedDataParallel.summon_full_params(root, writeback=False, **options):
        return copies(root.named_parameters())


def copies(named: Any) -> dict[str, torch.Tensor]:
    """Copy named tensors as they are now."""
    return {name: tensor.detach().clone().cpu() for name, tensor in named}


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters of a model that nobody wrapped."""
    return copies(model.named_parameters())


def gradients(model: nn.Module, size: int, steps: tuple[int, ...] = (0,)) -> dict[str, torch.Tensor]:
    """Compute on one rank what the mean over all ranks of the gradients accumulated in these steps is."""
    model.zero_grad()
    for step in steps:
        for rank in range(size):
            dtype = next(model.parameters()).dtype
            loss = mean_loss(model(batch(rank, step, dtype)), size) / size
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def trained_alone(
    size: int, dtype: torch.dtype = torch.float32, *, lr: float, steps: tuple[int, ...] = (0,)
) -> dict[str, torch.Tensor]:
    """Give the parameters after one step of SGD from the gradients accumulated in these steps."""
    model = tower(dtype)
    grads = gradients(model, size, steps)
    return {name: p.detach() - lr * grads[name] for name, p in model.named_parameters()}
