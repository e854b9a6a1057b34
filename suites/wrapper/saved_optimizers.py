"""Exercises of the state of optimizers of wrapped models: saved in one form, loaded into another, trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)

from shardproof import InterfaceBench
from suites.wrapper.claims import Claims
from suites.wrapper.saved_models import blank
from suites.wrapper.specimens import Wrapping, batch, mean_loss, parameters, summoned, tower, train

__all__ = [
    "Kind",
    "Route",
    "resume",
    "resume_groups",
    "resume_plain",
    "resume_wrapped_from_plain",
    "save_on_rank_0",
    "see_state",
]

_DTYPE = torch.float64
# In double precision orders of summation differ by 1e-16 a step; anything wrong differs by a share of a step, 1e-3.
_TOLERANCE = 1e-9
_BEFORE = 2  # steps until state is saved


class Kind(Enum):
    """Which optimizer."""

    SGD = "with momentum"
    ADAMW = "two moments and a count of steps"

    # Any: groups of parameters, or parameters.
    def build(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Build it."""
        if self is Kind.SGD:
            return torch.optim.SGD(params, lr=0.01, momentum=0.5, weight_decay=0.1)
        return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


class Route(Enum):
    """How state is taken out of one optimizer and put into another."""

    FULL = "optim_state_dict of full state dicts, on every rank"
    FULL_ON_RANK_0 = "optim_state_dict of full state dicts, on rank 0 alone"
    SHARDED = "optim_state_dict of sharded state dicts"
    LOADED_DIRECTLY = "optim_state_dict of full state dicts, which optim_state_dict_to_load loads itself"
    GIVEN = "optim_state_dict of a state that the caller took"
    SHARD_FULL = "full_optim_state_dict, shard_full_optim_state_dict"
    SCATTER_FULL = "full_optim_state_dict on rank 0, scatter_full_optim_state_dict"
    FLATTEN_SHARDED = "sharded_optim_state_dict, flatten_sharded_optim_state_dict"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trained:
    root: Any  # the engine's wrapper, or a plain model
    optimizer: torch.optim.Optimizer


def resume(bench: InterfaceBench, route: Route, kind: Kind, before: Wrapping, after: Wrapping) -> None:
    """Train, hand model and optimizer over to others, train on; note what came of it."""
    first = _trained(bench, before, kind)
    second = _fresh(bench, after, kind)
    _hand_over_model(bench, first.root, second.root)
    _hand_over(bench, route, first, second)
    _step(bench, second, _BEFORE)
    got = summoned(bench, second.root)
    Claims(bench).near("parameters afterwards", got, _alone(bench, kind, _BEFORE + 1), tolerance=_TOLERANCE)


def see_state(bench: InterfaceBench, kind: Kind, wrapping: Wrapping) -> None:
    """Note the keys, shapes and values of a full state of the optimizer."""
    claims = Claims(bench)
    trained = _trained(bench, wrapping, kind)
    saved = _save(bench, trained, StateDictType.FULL_STATE_DICT)
    alone = _plain(bench, kind, _BEFORE)
    names = list(parameters(alone.root))
    expected = alone.optimizer.state_dict()["state"]
    claims.same("whose state it is", sorted(saved["state"]), sorted(names))
    claims.near(
        "the state",
        {name: _sorted(saved["state"].get(name, {})) for name in names},
        {name: _sorted(expected[index]) for index, name in enumerate(names)},
        tolerance=_TOLERANCE,
    )
    (group,) = saved["param_groups"]
    claims.same("the names of the group", sorted(group["params"]), sorted(names))
    (ours,) = alone.optimizer.state_dict()["param_groups"]
    plain = {key: value for key, value in _sorted(ours).items() if key != "params"}
    claims.same("the options of the group", {key: group[key] for key in plain}, plain)


def save_on_rank_0(bench: InterfaceBench) -> None:
    """Note that rank 0 alone is given the state when that was asked for, and where it is."""
    claims = Claims(bench)
    trained = _trained(bench, Wrapping(), Kind.ADAMW)
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True)
    saved = _save(bench, trained, StateDictType.FULL_STATE_DICT, config)
    keys = ["param_groups", "state"] if bench.rank == 0 else []
    claims.same("what the rank is given", sorted(saved), keys)
    legacy = bench.names.FullyShardedDataParallel.full_optim_state_dict(trained.root, trained.optimizer)
    claims.same("what the rank is given by default", sorted(legacy), keys)
    everyone = bench.names.FullyShardedDataParallel.full_optim_state_dict(
        trained.root, trained.optimizer, rank0_only=False
    )
    claims.same("what every rank is given", sorted(everyone), ["param_groups", "state"])
    tensors = [
        v for state in saved.get("state", {}).values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    claims.same("elsewhere than on the host", {t.device.type for t in tensors} - {"cpu"}, set())


def resume_groups(bench: InterfaceBench) -> None:
    """Hand over the state of groups of parameters that take turns; note the groups, and training on."""
    claims = Claims(bench)
    first = _trained(bench, Wrapping(), Kind.SGD, _taking_turns)
    second = _fresh(bench, Wrapping(units=("head",)), Kind.SGD, _taking_turns)
    saved = _save(bench, first, StateDictType.FULL_STATE_DICT)
    names = list(parameters(tower()))
    members = [sorted(group["params"]) for group in saved["param_groups"]]
    turns = [sorted(names[0::2]), sorted(names[1::2])]
    claims.same("the names of each group", members, turns)
    claims.same("the options of each group", [g["weight_decay"] for g in saved["param_groups"]], [0.5, 0.0])
    if members != turns:
        return  # such groups fit no optimizer
    _hand_over_model(bench, first.root, second.root)
    _hand_over(bench, Route.FULL, first, second)
    _step(bench, second, _BEFORE)
    expected = _alone(bench, Kind.SGD, _BEFORE + 1, _taking_turns)
    claims.near("parameters afterwards", summoned(bench, second.root), expected, tolerance=_TOLERANCE)


def resume_plain(bench: InterfaceBench, kind: Kind, before: Wrapping) -> None:
    """Rekey a full state by numbers, load it into the optimizer of a model that nobody wrapped, and train on."""
    claims, engine = Claims(bench), bench.names.FullyShardedDataParallel
    first = _trained(bench, before, kind)
    full = engine.full_optim_state_dict(first.root, first.optimizer, rank0_only=False)
    plain = _plain(bench, kind, 0)
    plain.root.load_state_dict(summoned(bench, first.root), strict=False)
    keyed = engine.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain.root, optim=plain.optimizer)
    numbers = list(range(len(parameters(plain.root))))
    claims.same("the keys", sorted(keyed["state"]), numbers)
    claims.same("the members of the group", sorted(keyed["param_groups"][0]["params"]), numbers)
    again = engine.rekey_optim_state_dict(
        keyed, OptimStateKeyType.PARAM_ID, plain.root, optim=plain.optimizer
    )
    claims.same("the keys when nothing is to be done", sorted(again["state"]), numbers)
    plain.optimizer.load_state_dict(keyed)
    _plain_step(bench, plain, _BEFORE)
    claims.near(
        "parameters afterwards",
        parameters(plain.root),
        _alone(bench, kind, _BEFORE + 1),
        tolerance=_TOLERANCE,
    )


def resume_wrapped_from_plain(bench: InterfaceBench, kind: Kind) -> None:
    """Rekey the state of a plain optimizer by names, load it into that of a wrapped model, and train on."""
    claims, engine = Claims(bench), bench.names.FullyShardedDataParallel
    plain = _plain(bench, kind, _BEFORE)
    state = plain.optimizer.state_dict()
    keyed = engine.rekey_optim_state_dict(
        state, OptimStateKeyType.PARAM_NAME, plain.root, optim=plain.optimizer
    )
    claims.same("the keys", sorted(keyed["state"]), sorted(parameters(plain.root)))
    second = _fresh(bench, Wrapping(), kind)
    with engine.state_dict_type(second.root, StateDictType.FULL_STATE_DICT):
        second.root.load_state_dict(plain.root.state_dict())
    second.optimizer.load_state_dict(
        engine.shard_full_optim_state_dict(keyed, second.root, optim=second.optimizer)
    )
    _step(bench, second, _BEFORE)
    got = summoned(bench, second.root)
    claims.near("parameters afterwards", got, _alone(bench, kind, _BEFORE + 1), tolerance=_TOLERANCE)


Groups = Callable[[Any], Iterable[Any]]  # Any: a model, wrapped or plain; its parameters, or groups of them


def _all(model: Any) -> Iterable[Any]:
    found: Iterable[Any] = model.parameters()
    return found


def _taking_turns(model: Any) -> Iterable[Any]:
    params = list(model.parameters())
    return [{"params": params[0::2], "weight_decay": 0.5}, {"params": params[1::2], "weight_decay": 0.0}]


def _fresh(bench: InterfaceBench, wrapping: Wrapping, kind: Kind, groups: Groups = _all) -> _Trained:
    """Wrap a model whose values are all wrong, with an optimizer that has seen nothing."""
    root = wrapping.wrap(bench, blank().to(_DTYPE))
    return _Trained(root=root, optimizer=kind.build(groups(root)))


def _trained(bench: InterfaceBench, wrapping: Wrapping, kind: Kind, groups: Groups = _all) -> _Trained:
    root = wrapping.wrap(bench, tower(_DTYPE))
    trained = _Trained(root=root, optimizer=kind.build(groups(root)))
    for step in range(_BEFORE):
        _step(bench, trained, step)
    return trained


def _step(bench: InterfaceBench, trained: _Trained, step: int) -> None:
    train(bench, trained.root, step, _DTYPE)
    trained.optimizer.step()
    trained.optimizer.zero_grad()


def _plain(bench: InterfaceBench, kind: Kind, steps: int, groups: Groups = _all) -> _Trained:
    """Train on this rank alone, on the rows of all ranks."""
    model = tower(_DTYPE)
    trained = _Trained(root=model, optimizer=kind.build(groups(model)))
    for step in range(steps):
        _plain_step(bench, trained, step)
    return trained


def _plain_step(bench: InterfaceBench, trained: _Trained, step: int) -> None:
    for rank in range(bench.size):
        loss = mean_loss(trained.root(batch(rank, step, _DTYPE)), bench.size) / bench.size
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    trained.optimizer.step()
    trained.optimizer.zero_grad()


def _alone(bench: InterfaceBench, kind: Kind, steps: int, groups: Groups = _all) -> dict[str, torch.Tensor]:
    model: nn.Module = _plain(bench, kind, steps, groups).root
    return parameters(model)


def _hand_over_model(bench: InterfaceBench, first: Any, second: Any) -> None:
    engine, full = bench.names.FullyShardedDataParallel, StateDictType.FULL_STATE_DICT
    with engine.state_dict_type(first, full):
        saved = first.state_dict()
    with engine.state_dict_type(second, full):
        second.load_state_dict(saved)


def _save(
    bench: InterfaceBench,
    trained: _Trained,
    kind: StateDictType,
    config: FullOptimStateDictConfig | None = None,
) -> dict[str, Any]:
    engine = bench.names.FullyShardedDataParallel
    with engine.state_dict_type(trained.root, kind, None, config):
        saved: dict[str, Any] = engine.optim_state_dict(trained.root, trained.optimizer)
    return saved


def _hand_over(bench: InterfaceBench, route: Route, first: _Trained, second: _Trained) -> None:
    """Take the state out of one optimizer and put it into another."""
    match route:
        case Route.SHARD_FULL | Route.SCATTER_FULL | Route.FLATTEN_SHARDED:
            loadable = _by_older_names(bench, route, first, second)
        case _:
            loadable = _by_settings(bench, route, first, second)
    if route is not Route.LOADED_DIRECTLY:
        second.optimizer.load_state_dict(loadable)


def _by_settings(bench: InterfaceBench, route: Route, first: _Trained, second: _Trained) -> dict[str, Any]:
    engine = bench.names.FullyShardedDataParallel
    kind, model, optim = StateDictType.FULL_STATE_DICT, None, None
    if route is Route.SHARDED:
        kind = StateDictType.SHARDED_STATE_DICT
    elif route is Route.FULL_ON_RANK_0:
        model, optim = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with engine.state_dict_type(first.root, kind, model, optim):
        given = _taken_away(first.optimizer) if route is Route.GIVEN else None
        saved = engine.optim_state_dict(first.root, first.optimizer, given)
    is_direct = route is Route.LOADED_DIRECTLY
    with engine.state_dict_type(second.root, kind, model, optim):
        loadable: dict[str, Any] = engine.optim_state_dict_to_load(
            second.root, second.optimizer, saved, load_directly=is_direct
        )
    return loadable


def _taken_away(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy the state, and clear it where it was, so that nobody finds it there."""
    taken = copy.deepcopy(optimizer.state_dict())
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    return taken


def _by_older_names(bench: InterfaceBench, route: Route, first: _Trained, second: _Trained) -> dict[str, Any]:
    engine = bench.names.FullyShardedDataParallel
    loadable: dict[str, Any]
    if route is Route.FLATTEN_SHARDED:
        sharded = engine.sharded_optim_state_dict(first.root, first.optimizer)
        loadable = engine.flatten_sharded_optim_state_dict(sharded, second.root, second.optimizer)
    elif route is Route.SHARD_FULL:
        full = engine.full_optim_state_dict(first.root, first.optimizer, rank0_only=False)
        loadable = engine.shard_full_optim_state_dict(full, second.root, optim=second.optimizer)
    else:
        full = engine.full_optim_state_dict(first.root, first.optimizer)
        given = full if bench.rank == 0 else None
        loadable = engine.scatter_full_optim_state_dict(given, second.root, optim=second.optimizer)
    return loadable


def _sorted(values: dict[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in sorted(values)}
