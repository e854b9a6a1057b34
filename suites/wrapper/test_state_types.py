"""The type of state dicts and its configs: set, returned, scoped by a context, and refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, LocalOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig, OptimStateDictConfig, ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictConfig, StateDictSettings, StateDictType

from shardproof.suites.params import param, parametrize
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import tower

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
CLASSES = (
    "StateDictSettings",
    "StateDictConfig",
    "OptimStateDictConfig",
    *(config.__name__ for configs in _CONFIGS.values() for config in configs),
)


def _defaults(kind: StateDictType) -> list[Any]:
    """Format a type with its default configs."""
    return [kind, *(config() for config in _CONFIGS[kind])]


@pytest.mark.api("set_state_dict_type", "get_state_dict_type", *CLASSES)
@pytest.mark.kills("ForgetsConfigs", "TellsTheNewTypeAsTheOld")
@expects(
    "the type at first", "what was before", "what is returned", "configs of one's own", "what a unit returns"
)
def test_sets_the_type_and_returns_what_was_before(bench: Bench) -> None:
    root = bench.wrapped(tower())
    first = bench.api.set_state_dict_type(root, SHARDED)
    bench.same("the type at first", first.state_dict_type, FULL)
    for kind in (LOCAL, FULL, SHARDED):
        before = _settings(bench, root)
        previous = bench.api.set_state_dict_type(root, kind)
        bench.same("what was before", _spelt(previous), before)
        bench.same("what is returned", _settings(bench, root), _defaults(kind))
    configs = (
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
    )
    bench.api.set_state_dict_type(root, FULL, *configs)
    bench.same("configs of one's own", _settings(bench, root), [FULL, *configs])
    bench.same("what a unit returns", _settings(bench, root.middle), [FULL, *configs])


each_type = parametrize(
    "kind",
    *[
        param(kind, id=name, marks=pytest.mark.api(*(config.__name__ for config in _CONFIGS[kind])))
        for name, kind in (("full", FULL), ("local", LOCAL), ("sharded", SHARDED))
    ],
)


@pytest.mark.kills("IgnoresStateConfigs")
@pytest.mark.api("StateDictType", "StateDictSettings", "StateDictConfig", "OptimStateDictConfig")
@each_type
@expects("before", "by default", "offloaded by default", "returned", "as chosen")
def test_keeps_the_settings(bench: Bench, kind: StateDictType) -> None:
    """Set type and configs, with no configs and with all."""
    root = bench.wrapped(tower())
    of_parameters, of_optimizer = _CONFIGS[kind]
    before = bench.api.set_state_dict_type(root, kind)
    bench.same("before", before, StateDictSettings(*_defaults(FULL)))
    by_default = bench.api.get_state_dict_type(root)
    bench.same("by default", by_default, StateDictSettings(*_defaults(kind)))
    offloads = [
        by_default.state_dict_config.offload_to_cpu,
        by_default.optim_state_dict_config.offload_to_cpu,
    ]
    bench.same("offloaded by default", offloads, [False, kind is not LOCAL])
    chosen: list[Any] = [kind, of_parameters(offload_to_cpu=True), of_optimizer(offload_to_cpu=False)]
    given = bench.api.set_state_dict_type(root, *chosen)
    bench.same("returned", given, StateDictSettings(*_defaults(kind)))
    bench.same("as chosen", bench.api.get_state_dict_type(root), StateDictSettings(*chosen))


@pytest.mark.api("set_state_dict_type", "get_state_dict_type")
@pytest.mark.kills("SetsTheTypeOfTheFirstRootAlone")
@expects("what each returns")
def test_sets_the_type_of_all_wrapped_modules_below(bench: Bench) -> None:
    first, second = bench.wrapped(tower()), bench.wrapped(tower())
    plain = nn.ModuleList([first, nn.Linear(2, 2), second])
    bench.api.set_state_dict_type(plain, SHARDED)
    for root in (plain, first, second):
        bench.same("what each returns", _settings(bench, root), _defaults(SHARDED))


@pytest.mark.api("state_dict_type")
@pytest.mark.kills("ScopesNothing")
@expects("inside", "inside both", "inside again", "afterwards")
def test_restores_the_type_at_the_end_of_a_context(bench: Bench) -> None:
    root = bench.wrapped(tower())
    bench.api.set_state_dict_type(root, FULL, FullStateDictConfig(rank0_only=True))
    outer = _settings(bench, root)
    with bench.api.state_dict_type(root, SHARDED):
        bench.same("inside", _settings(bench, root), _defaults(SHARDED))
        with bench.api.state_dict_type(root, LOCAL):
            bench.same("inside both", _settings(bench, root), _defaults(LOCAL))
        bench.same("inside again", _settings(bench, root), _defaults(SHARDED))
    bench.same("afterwards", _settings(bench, root), outer)


@pytest.mark.api("state_dict_type")
@pytest.mark.kills("LeavesTheTypeAfterAnException")
@expects("the exception", "the type afterwards")
def test_restores_the_type_after_an_exception(bench: Bench) -> None:
    root = bench.wrapped(tower())
    bench.api.set_state_dict_type(root, FULL)

    def leave() -> None:
        with bench.api.state_dict_type(root, SHARDED):
            raise KeyError("of the caller")

    bench.refuses("the exception", leave, KeyError)
    bench.same("the type afterwards", _settings(bench, root), _defaults(FULL))


@pytest.mark.api("set_state_dict_type", *CLASSES)
@pytest.mark.kills("TakesConfigsOfOtherTypes")
@expects("configs of another type", "the type afterwards")
def test_refuses_configs_of_another_type_and_sets_nothing(bench: Bench) -> None:
    root = bench.wrapped(tower())
    bench.api.set_state_dict_type(root, SHARDED)
    wrong: list[tuple[StateDictType, Any, Any]] = [
        (FULL, ShardedStateDictConfig(), None),
        (SHARDED, FullStateDictConfig(), None),
        (LOCAL, StateDictConfig(), None),
        (FULL, None, ShardedOptimStateDictConfig()),
        (SHARDED, None, LocalOptimStateDictConfig()),
    ]
    for arguments in wrong:
        call = partial(bench.api.set_state_dict_type, root, *arguments)
        bench.refuses("configs of another type", call, RuntimeError)
    bench.same("the type afterwards", _settings(bench, root), _defaults(SHARDED))


@pytest.mark.kills("IgnoresStateConfigs")
@pytest.mark.api("StateDictType")
@each_type
@expects("config of another type", "optimizer's config of another type")
def test_refuses_configs_of_each_other_type(bench: Bench, kind: StateDictType) -> None:
    root = bench.wrapped(tower())
    own, _ = _CONFIGS[kind]
    set_type = partial(bench.api.set_state_dict_type, root, kind)
    for of_parameters, of_optimizer in (configs for other, configs in _CONFIGS.items() if other is not kind):
        bench.refuses("config of another type", partial(set_type, of_parameters()), RuntimeError)
        call = partial(set_type, own(), of_optimizer())
        bench.refuses("optimizer's config of another type", call, RuntimeError)


@pytest.mark.api("get_state_dict_type", "set_state_dict_type")
@pytest.mark.kills("TellsTheTypeOfSomeUnit")
@expects("asking units that differ", "setting units that differ", "asking units of other configs")
def test_refuses_units_of_several_types(bench: Bench) -> None:
    root, other = bench.wrapped(tower()), bench.wrapped(tower())
    ask, set_type = bench.api.get_state_dict_type, bench.api.set_state_dict_type
    set_type(root, FULL)
    set_type(root.middle, SHARDED)
    bench.refuses("asking units that differ", lambda: ask(root), AssertionError)
    bench.refuses("setting units that differ", lambda: set_type(root, FULL), AssertionError)
    set_type(other, FULL)
    set_type(other.middle, FULL, FullStateDictConfig(rank0_only=True))
    bench.refuses("asking units of other configs", lambda: ask(other), AssertionError)


# Any: engines have no common base class.
def _settings(bench: Bench, module: Any) -> list[Any]:
    try:
        return _spelt(bench.api.get_state_dict_type(module))
    except AssertionError as error:
        return [str(error)]  # units differ, where they must not


def _spelt(settings: Any) -> list[Any]:
    return [settings.state_dict_type, settings.state_dict_config, settings.optim_state_dict_config]
