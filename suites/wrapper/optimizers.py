"""Optimizers of wrapped models: trained for a while, their state saved and loaded into others, which continue."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateDictConfig
from torch.distributed.fsdp import StateDictType

from shardproof.suites.wrapper.expect import Bench
from shardproof.suites.tower import blank, parameters, tower, train_alone
from shardproof.suites.wrapper.wrapping import Wrapping

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
BEFORE = 2  # steps until state is saved
RESUMED = "parameters afterwards"
# In double precision orders of summation differ by 1e-16 a step; any defect by a fraction of a step, 1e-3.
TOLERANCE = 1e-9
_DTYPE = torch.float64

Groups = Callable[[Any], Iterable[Any]]  # Any: a model, wrapped or plain; its parameters, or groups of them


class Kind(Enum):
    """The kinds of optimizers."""

    SGD = "with momentum"
    ADAMW = "two moments and a count of steps"

    # Any: groups of parameters, or parameters.
    def build(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Build it."""
        if self is Kind.SGD:
            return torch.optim.SGD(params, lr=0.01, momentum=0.5, weight_decay=0.1)
        return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


class Route(Enum):
    """How state is saved from one optimizer and loaded into another."""

    FULL = "optim_state_dict of full state dicts, on every rank"
    FULL_ON_RANK_0 = "optim_state_dict of full state dicts, on rank 0 alone"
    SHARDED = "optim_state_dict of sharded state dicts"
    LOADED_DIRECTLY = "optim_state_dict of full state dicts, which optim_state_dict_to_load loads itself"
    GIVEN = "optim_state_dict of a state that the caller took"
    SHARD_FULL = "full_optim_state_dict, shard_full_optim_state_dict"
    SCATTER_FULL = "full_optim_state_dict on rank 0, scatter_full_optim_state_dict"
    FLATTEN_SHARDED = "sharded_optim_state_dict, flatten_sharded_optim_state_dict"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """A model with its optimizer: wrapped, or plain and trained in one process on the rows of all ranks."""

    bench: Bench
    root: Any  # the engine's wrapper, or a plain model
    optimizer: torch.optim.Optimizer
    is_plain: bool = False

    def step(self, number: int) -> None:
        """Take the step of this number."""
        if self.is_plain:
            train_alone(self.root, self.bench.ranks, number)
        else:
            self.bench.train(self.root, number, _DTYPE)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copy whole parameters, by name."""
        return parameters(self.root) if self.is_plain else self.bench.summoned(self.root)

    def saved(self, kind: StateDictType = FULL, config: OptimStateDictConfig | None = None) -> dict[str, Any]:
        """Return the state of the optimizer, in the type of that name."""
        with self.bench.api.state_dict_type(self.root, kind, None, config):
            saved: dict[str, Any] = self.bench.api.optim_state_dict(self.root, self.optimizer)
        return saved


def _all(model: Any) -> Iterable[Any]:
    found: Iterable[Any] = model.parameters()
    return found


def fresh(bench: Bench, wrapping: Wrapping, kind: Kind, groups: Groups = _all) -> Trained:
    """Wrap a model whose values are all wrong, with an optimizer that has not stepped."""
    root = bench.wrapped_by(wrapping, blank().to(_DTYPE))
    return Trained(bench=bench, root=root, optimizer=kind.build(groups(root)))


def trained(bench: Bench, wrapping: Wrapping, kind: Kind, groups: Groups = _all) -> Trained:
    """Wrap a model, and train it until state is saved."""
    root = bench.wrapped_by(wrapping, tower(_DTYPE))
    found = Trained(bench=bench, root=root, optimizer=kind.build(groups(root)))
    for number in range(BEFORE):
        found.step(number)
    return found


def plain(bench: Bench, kind: Kind, steps: int, groups: Groups = _all) -> Trained:
    """Train a model that is not wrapped."""
    model = tower(_DTYPE)
    found = Trained(bench=bench, root=model, optimizer=kind.build(groups(model)), is_plain=True)
    for number in range(steps):
        found.step(number)
    return found


def resume(bench: Bench, route: Route, kind: Kind, before: Wrapping, after: Wrapping) -> None:
    """Train, transfer model and optimizer state to others, and claim that these continue."""
    first, second = trained(bench, before, kind), fresh(bench, after, kind)
    hand_over(route, first, second)
    claim_resumed(second, kind)


def claim_resumed(second: Trained, kind: Kind, groups: Groups = _all) -> None:
    """Take the next step, and claim that it equals that of one process which trained without a break."""
    second.step(BEFORE)
    expected = plain(second.bench, kind, BEFORE + 1, groups).parameters()
    second.bench.near(RESUMED, second.parameters(), expected, tolerance=TOLERANCE)


def hand_over(route: Route, first: Trained, second: Trained) -> None:
    """Save model and state of one optimizer, and load them into another."""
    api = first.bench.api
    with api.state_dict_type(first.root, FULL):
        model = first.root.state_dict()
    with api.state_dict_type(second.root, FULL):
        second.root.load_state_dict(model)
    loadable = _loadable(route, first, second)
    if route is not Route.LOADED_DIRECTLY:
        second.optimizer.load_state_dict(loadable)


def _loadable(route: Route, first: Trained, second: Trained) -> Any:
    api, ours = first.bench.api, (first.root, first.optimizer)
    match route:
        case Route.FLATTEN_SHARDED:
            sharded = api.sharded_optim_state_dict(*ours)
            return api.flatten_sharded_optim_state_dict(sharded, second.root, second.optimizer)
        case Route.SHARD_FULL:
            full = api.full_optim_state_dict(*ours, rank0_only=False)
            return api.shard_full_optim_state_dict(full, second.root, optim=second.optimizer)
        case Route.SCATTER_FULL:
            full = api.full_optim_state_dict(*ours)
            full = full if first.bench.rank == 0 else None
            return api.scatter_full_optim_state_dict(full, second.root, optim=second.optimizer)
        case _:
            return _loadable_by_settings(route, first, second)


def _loadable_by_settings(route: Route, first: Trained, second: Trained) -> Any:
    api = first.bench.api
    settings: tuple[Any, ...] = (SHARDED if route is Route.SHARDED else FULL,)
    if route is Route.FULL_ON_RANK_0:
        settings += (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    with api.state_dict_type(first.root, *settings):
        given = _taken_away(first.optimizer) if route is Route.GIVEN else None
        saved = api.optim_state_dict(first.root, first.optimizer, given)
    is_direct = route is Route.LOADED_DIRECTLY
    with api.state_dict_type(second.root, *settings):
        return api.optim_state_dict_to_load(second.root, second.optimizer, saved, load_directly=is_direct)


def _taken_away(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy the state, and clear the original, so that it cannot be found there."""
    taken = copy.deepcopy(optimizer.state_dict())
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    return taken
