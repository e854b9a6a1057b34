"""Checkpoints cross between the wrapper and torch's own FSDP1, and training goes on as if nothing had been."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from shardproof.engine import reference
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldKind
from tests.reference.ranks import Ranks

WRAPPERS: dict[str, type[reference.FullyShardedDataParallel | torch_fsdp.FullyShardedDataParallel]] = {
    "reference": reference.FullyShardedDataParallel,
    "torch": torch_fsdp.FullyShardedDataParallel,
}
NUM_ROWS = 12  # divisible by every world size here, so that the mean of the ranks' means is the batch's
# Float64 everywhere; only the order of summation differs. AdamW's root and division magnify it somewhat.
TOLERANCE = 1e-10


class Net(nn.Module):
    """Sizes that no world divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("offset", torch.arange(3.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(rows))))
        output: torch.Tensor = self.last(hidden) + self.offset
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Whose wrapper, and how it lies over the model."""

    wrapper: str
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    uses_orig_params: bool = True
    units: tuple[str, ...] = ("first", "middle")

    def wrap(self, model: nn.Module) -> Any:
        wrap = partial(
            WRAPPERS[self.wrapper],
            sharding_strategy=self.strategy,
            use_orig_params=self.uses_orig_params,
            device_id=torch.device("cpu"),
        )
        for name in self.units:
            setattr(model, name, wrap(getattr(model, name)))
        return wrap(model)


def fresh(seed: int = 0) -> Net:
    """Build the model; another seed, other values."""
    torch.manual_seed(seed)
    return Net().double()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer whose state has tensors and a count."""
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """Build one whose state has tensors alone."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def rows(step: int) -> torch.Tensor:
    """Draw the whole batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(NUM_ROWS, 5, generator=generator, dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, batch: torch.Tensor) -> None:
    """Take one step on these rows."""
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def oracle(factory: Callable[[nn.Module], torch.optim.Optimizer], steps: int) -> Mapping[str, torch.Tensor]:
    """Train on one process; gives the model's state."""
    model = fresh()
    optimizer = factory(model)
    for step in range(steps):
        train(model, optimizer, step, rows(step))
    return model.state_dict()


def save(side: Side, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return whole states, on every rank."""
    wrapper = WRAPPERS[side.wrapper]
    configs = (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False))
    with wrapper.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        saved = {"model": model.state_dict(), "optimizer": wrapper.optim_state_dict(model, optimizer)}
    return copy.deepcopy(saved)


def load(side: Side, model: Any, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Take whole states."""
    wrapper = WRAPPERS[side.wrapper]
    configs = (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False))
    with wrapper.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        model.load_state_dict(saved["model"])
        made = wrapper.optim_state_dict_to_load(model, optimizer, saved["optimizer"])
    optimizer.load_state_dict(made)


def resume_in(
    context: RankContext, before: Side, after: Side, factory: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """Train two steps under one wrapper and one more under the other, from what the first one saved."""
    mine = slice(context.rank * NUM_ROWS // context.size, (context.rank + 1) * NUM_ROWS // context.size)
    model = before.wrap(fresh())
    optimizer = factory(model)
    for step in range(2):
        train(model, optimizer, step, rows(step)[mine])
    saved = save(before, model, optimizer)
    agrees(saved["model"], oracle(factory, 2))
    successor = after.wrap(fresh(seed=1))
    next_optimizer = factory(successor)
    load(after, successor, next_optimizer, saved)
    train(successor, next_optimizer, 2, rows(2)[mine])
    agrees(save(after, successor, next_optimizer)["model"], oracle(factory, 3))


def agrees(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare all entries, by name."""
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)


OURS = Side(wrapper="reference")
THEIRS = Side(wrapper="torch")
CROSSINGS = {
    "torch to reference": (THEIRS, OURS),
    "reference to torch": (OURS, THEIRS),
    "torch flat to reference": (Side(wrapper="torch", uses_orig_params=False), OURS),
    "torch to reference flat": (THEIRS, Side(wrapper="reference", uses_orig_params=False)),
    "reference flat to torch": (Side(wrapper="reference", uses_orig_params=False), THEIRS),
    "torch to reference, replicated": (THEIRS, Side(wrapper="reference", strategy=ShardingStrategy.NO_SHARD)),
    "reference replicated to torch": (
        Side(wrapper="reference", strategy=ShardingStrategy.NO_SHARD),
        Side(wrapper="torch", units=()),
    ),
    "reference to reference, wrapped otherwise": (OURS, Side(wrapper="reference", units=("last",))),
}


@pytest.mark.parametrize("factory", [adamw, momentum], ids=lambda factory: str(factory.__name__))
@pytest.mark.parametrize("crossing", CROSSINGS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_checkpoint_crosses(
    crossing: str, size: int, factory: Callable[[nn.Module], torch.optim.Optimizer], ranks: Ranks
) -> None:
    before, after = CROSSINGS[crossing]
    # torch's functions for optimizer states keep a profile that all threads of a process share, and clear it.
    kind = WorldKind.THREADS if "torch" not in crossing else WorldKind.PROCESSES
    ranks.run(size, resume_in, before, after, factory, kind=kind)
