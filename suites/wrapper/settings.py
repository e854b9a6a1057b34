"""Exercises of the state dict type of a wrapped model: set, told, scoped, and refused."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)

from shardproof import InterfaceBench
from suites.wrapper.claims import Claims
from suites.wrapper.specimens import tower, wrapped

__all__ = [
    "leave_by_an_exception",
    "refuse_configs",
    "refuse_mixtures",
    "scope_types",
    "set_types",
    "set_types_of_others",
]

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
# What each type is configured by where nobody configures it.
_DEFAULTS: dict[StateDictType, tuple[StateDictConfig, OptimStateDictConfig]] = {
    FULL: (FullStateDictConfig(), FullOptimStateDictConfig()),
    SHARDED: (ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
    LOCAL: (LocalStateDictConfig(), LocalOptimStateDictConfig()),
}


def set_types(bench: InterfaceBench) -> None:
    """Set one type after the other, with configs and without; note what is told, and what was before."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    root = wrapped(bench, tower())
    first = engine.set_state_dict_type(root, SHARDED)
    claims.same("the type at first", first.state_dict_type, FULL)
    for kind in (LOCAL, FULL, SHARDED):
        before = _told(engine, root)
        previous = engine.set_state_dict_type(root, kind)
        claims.same("what was before", _spelt(previous), before)
        claims.same("what is told", _told(engine, root), [kind, *_DEFAULTS[kind]])
    configs = (
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
    )
    engine.set_state_dict_type(root, FULL, *configs)
    claims.same("configs of one's own", _told(engine, root), [FULL, *configs])
    claims.same("what a unit tells", _told(engine, root.middle), [FULL, *configs])


def set_types_of_others(bench: InterfaceBench) -> None:
    """Set the type of wrapped models inside a module that is not wrapped."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    first, second = wrapped(bench, tower()), wrapped(bench, tower())
    plain = nn.ModuleList([first, nn.Linear(2, 2), second])
    engine.set_state_dict_type(plain, SHARDED)
    for root in (plain, first, second):
        claims.same("what each tells", _told(engine, root), [SHARDED, *_DEFAULTS[SHARDED]])


def scope_types(bench: InterfaceBench) -> None:
    """Enter contexts inside each other; note what is told in them, and once each has ended."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    root = wrapped(bench, tower())
    config = FullStateDictConfig(rank0_only=True)
    engine.set_state_dict_type(root, FULL, config)
    outer = _told(engine, root)
    with engine.state_dict_type(root, SHARDED):
        claims.same("inside", _told(engine, root), [SHARDED, *_DEFAULTS[SHARDED]])
        with engine.state_dict_type(root, LOCAL):
            claims.same("inside both", _told(engine, root), [LOCAL, *_DEFAULTS[LOCAL]])
        claims.same("inside again", _told(engine, root), [SHARDED, *_DEFAULTS[SHARDED]])
    claims.same("afterwards", _told(engine, root), outer)


def leave_by_an_exception(bench: InterfaceBench) -> None:
    """Leave a context by an exception; note what is told then."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    root = wrapped(bench, tower())
    engine.set_state_dict_type(root, FULL)

    def leave() -> None:
        with engine.state_dict_type(root, SHARDED):
            raise KeyError("of the caller")

    claims.refuses("the exception", leave, KeyError)
    claims.same("the type afterwards", _told(engine, root), [FULL, *_DEFAULTS[FULL]])


def refuse_configs(bench: InterfaceBench) -> None:
    """Note what becomes of configs of another type, and that nothing is set by them."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    root = wrapped(bench, tower())
    engine.set_state_dict_type(root, SHARDED)
    wrong: list[tuple[StateDictType, Any, Any]] = [
        (FULL, ShardedStateDictConfig(), None),
        (SHARDED, FullStateDictConfig(), None),
        (LOCAL, StateDictConfig(), None),
        (FULL, None, ShardedOptimStateDictConfig()),
        (SHARDED, None, LocalOptimStateDictConfig()),
    ]
    for kind, model, optimizer in wrong:
        claims.refuses(
            "configs of another type",
            lambda k=kind, m=model, o=optimizer: engine.set_state_dict_type(root, k, m, o),  # type: ignore[misc]
            RuntimeError,
        )
    claims.same("what is told afterwards", _told(engine, root), [SHARDED, *_DEFAULTS[SHARDED]])


def refuse_mixtures(bench: InterfaceBench) -> None:
    """Set a unit to another type than the rest; note what becomes of asking for the type, and of setting it."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    root = wrapped(bench, tower())
    engine.set_state_dict_type(root, FULL)
    engine.set_state_dict_type(root.middle, SHARDED)
    claims.refuses("asking units that differ", lambda: engine.get_state_dict_type(root), AssertionError)
    claims.refuses(
        "setting units that differ", lambda: engine.set_state_dict_type(root, FULL), AssertionError
    )
    other = wrapped(bench, tower())
    engine.set_state_dict_type(other, FULL)
    engine.set_state_dict_type(other.middle, FULL, FullStateDictConfig(rank0_only=True))
    claims.refuses("asking units of other configs", lambda: engine.get_state_dict_type(other), AssertionError)


def _told(engine: Any, module: Any) -> list[Any]:
    try:
        return _spelt(engine.get_state_dict_type(module))
    except AssertionError as error:
        return [str(error)]  # units differ, where they must not


def _spelt(settings: Any) -> list[Any]:
    return [settings.state_dict_type, settings.state_dict_config, settings.optim_state_dict_config]
