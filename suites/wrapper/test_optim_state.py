"""The state of optimizers of wrapped models: by original names, and trained on as if it had never been saved.

The older names are here too: full, sharded, scattered, flattened, and keyed by number or name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateDictConfig, OptimStateKeyType
from torch.distributed.fsdp import ShardedOptimStateDictConfig, StateDictType

from shardproof import APART, SEVERAL
from shardproof.suites.params import param, parametrize
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import parameters, tower
from shardproof.suites.wrapper.wrapping import FLAT, HYBRID, KEPT, MESH, MESH_ROOT, OTHER_UNITS, SHARDS, WHOLE
from shardproof.suites.wrapper.wrapping import WHOLE_FLAT, Form, Wrapping
from shardproof.suites.wrapper.optimizers import BEFORE, FULL, RESUMED, SHARDED, TOLERANCE, Kind, Route
from shardproof.suites.wrapper.optimizers import claim_resumed, fresh, hand_over, plain, resume, trained

FLAT_HEAD = Wrapping(form=Form.FLAT, units=("head",))
SGD, ADAMW = Kind.SGD, Kind.ADAMW
MUTANTS = {SGD: "LosesMomentum", ADAMW: "RestartsTheCountOfSteps"}
BY_SETTINGS = pytest.mark.api("optim_state_dict", "optim_state_dict_to_load")


def _resumed(kind: Kind, *wrappings: Wrapping) -> Any:
    return param(kind, *wrappings, kills=MUTANTS[kind])


EACH_KIND = parametrize("kind", *Kind)


@EACH_KIND
@pytest.mark.api("optim_state_dict", "FullOptimStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NamesTheWrapperInOptimizerStates", "LosesMomentumWhenItSaves")
@parametrize("wrapping", SHARDS, FLAT, WHOLE, HYBRID)
@expects("whose state it is", "the state", "the names of the group", "the options of the group")
def test_saves_state_as_if_the_model_were_not_wrapped(bench: Bench, kind: Kind, wrapping: Wrapping) -> None:
    saved, alone = trained(bench, wrapping, kind).saved(), plain(bench, kind, BEFORE)
    names, expected = list(alone.parameters()), alone.optimizer.state_dict()
    bench.same("whose state it is", sorted(saved["state"]), sorted(names))
    bench.near(
        "the state",
        {name: _sorted(saved["state"].get(name, {})) for name in names},
        {name: _sorted(expected["state"][index]) for index, name in enumerate(names)},
        tolerance=TOLERANCE,
    )
    (group,), (ours,) = saved["param_groups"], expected["param_groups"]
    bench.same("the names of the group", sorted(group["params"]), sorted(names))
    options = {key: value for key, value in ours.items() if key != "params"}
    bench.same("the options of the group", {key: group[key] for key in options}, options)


@pytest.mark.api(
    "optim_state_dict", "full_optim_state_dict", "FullOptimStateDictConfig", "OptimStateDictConfig"
)
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SavesOnEveryRank")
@expects("what the rank has", "what it has by default", "what every rank has", "elsewhere than on the host")
def test_saves_state_on_rank_0_alone(bench: Bench) -> None:
    first = trained(bench, SHARDS, ADAMW)
    saved = first.saved(FULL, FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True))
    keys = ["param_groups", "state"] if bench.rank == 0 else []
    bench.same("what the rank has", sorted(saved), keys)
    by_default = bench.api.full_optim_state_dict(first.root, first.optimizer)
    bench.same("what it has by default", sorted(by_default), keys)
    everyone = bench.api.full_optim_state_dict(first.root, first.optimizer, rank0_only=False)
    bench.same("what every rank has", sorted(everyone), ["param_groups", "state"])
    values = [value for state in saved.get("state", {}).values() for value in state.values()]
    places = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    bench.same("elsewhere than on the host", places - {"cpu"}, set())


def _form(id: str, kind: StateDictType, config: OptimStateDictConfig, mutant: str) -> Any:
    return param(kind, config, id=id, kills=mutant)


# While torch gathers optimizer state, its timers are per process (pytorch#108290).
@pytest.mark.api("StateDictType", "FullOptimStateDictConfig", "ShardedOptimStateDictConfig")
@pytest.mark.worlds(APART)
@parametrize(
    "kind, config",
    _form("full", FULL, FullOptimStateDictConfig(), "GivesShardsForWholes"),
    _form("rank0", FULL, FullOptimStateDictConfig(rank0_only=True), "IgnoresStateConfigs"),
    _form("sharded", SHARDED, ShardedOptimStateDictConfig(), "GivesWholesForShards"),
)
@expects("names", "sizes")
def test_saves_state_in_the_form_set(bench: Bench, kind: StateDictType, config: OptimStateDictConfig) -> None:
    states = trained(bench, MESH, SGD).saved(kind, config).get("state", {})
    is_empty = getattr(config, "rank0_only", False) and bench.rank != 0
    expected = {} if is_empty else {name: p.numel() for name, p in parameters(tower()).items()}
    bench.same("names", sorted(states), sorted(expected))
    momenta = {name: state["momentum_buffer"] for name, state in states.items()}
    bench.same("sizes", bench.sizes_of(momenta, list(expected), is_sharded=kind is SHARDED), expected)


@BY_SETTINGS
@parametrize(
    "kind, before, after",
    _resumed(SGD, SHARDS, FLAT),
    _resumed(SGD, FLAT, KEPT),
    _resumed(SGD, KEPT, WHOLE),
    _resumed(SGD, WHOLE, WHOLE_FLAT),
    _resumed(SGD, WHOLE_FLAT, OTHER_UNITS),
    _resumed(SGD, OTHER_UNITS, HYBRID),
    _resumed(SGD, HYBRID, SHARDS),
    _resumed(ADAMW, FLAT, FLAT_HEAD),
    _resumed(ADAMW, FLAT, WHOLE_FLAT),
    _resumed(ADAMW, WHOLE, WHOLE_FLAT),
    _resumed(ADAMW, WHOLE, OTHER_UNITS),
)
@expects(RESUMED)
def test_resumes_in_another_wrapping(bench: Bench, kind: Kind, before: Wrapping, after: Wrapping) -> None:
    resume(bench, Route.FULL, kind, before, after)


@BY_SETTINGS
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SavesTheLastMomentAsAll")
@parametrize("after", SHARDS, FLAT_HEAD)
@expects(RESUMED)
def test_resumes_two_moments_of_shards_by_name(bench: Bench, after: Wrapping) -> None:
    resume(bench, Route.FULL, ADAMW, SHARDS, after)


@BY_SETTINGS
@pytest.mark.kills("SharesTheCountOfSteps")
@parametrize("after", SHARDS, KEPT)
@expects(RESUMED)
def test_resumes_by_name_the_steps_that_flat_parameters_shared(bench: Bench, after: Wrapping) -> None:
    resume(bench, Route.FULL, ADAMW, FLAT, after)


@BY_SETTINGS
@pytest.mark.api("ShardedOptimStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "kind, before, after",
    _resumed(SGD, SHARDS, FLAT_HEAD),
    _resumed(ADAMW, SHARDS, FLAT_HEAD),
    _resumed(SGD, MESH, MESH_ROOT),
    _resumed(ADAMW, MESH, MESH_ROOT),
)
@expects(RESUMED)
def test_resumes_from_shards(bench: Bench, kind: Kind, before: Wrapping, after: Wrapping) -> None:
    resume(bench, Route.SHARDED, kind, before, after)


def _route(route: Route, *names: str, marks: Iterable[pytest.MarkDecorator] = ()) -> Any:
    return param(route, marks=[pytest.mark.api(*names), *marks])


_SETTINGS = ("optim_state_dict", "optim_state_dict_to_load", "FullOptimStateDictConfig")


@parametrize("kind, before", _resumed(SGD, SHARDS), _resumed(ADAMW, FLAT))
@parametrize(
    "route",
    _route(Route.FULL_ON_RANK_0, *_SETTINGS),
    _route(Route.LOADED_DIRECTLY, *_SETTINGS),
    _route(Route.SHARD_FULL, "full_optim_state_dict", "shard_full_optim_state_dict"),
    _route(Route.SCATTER_FULL, "full_optim_state_dict", "scatter_full_optim_state_dict"),
    _route(
        Route.FLATTEN_SHARDED,
        *("sharded_optim_state_dict", "flatten_sharded_optim_state_dict"),
        marks=[pytest.mark.worlds(SEVERAL)],
    ),
)
@expects(RESUMED)
def test_resumes_by_every_route(bench: Bench, route: Route, kind: Kind, before: Wrapping) -> None:
    resume(bench, route, kind, before, FLAT_HEAD)


@pytest.mark.api("optim_state_dict")
@pytest.mark.kills("IgnoresTheStateGiven")
@parametrize("kind, before", (SGD, SHARDS), (ADAMW, FLAT))
@expects(RESUMED)
def test_resumes_from_the_state_in_an_argument(bench: Bench, kind: Kind, before: Wrapping) -> None:
    resume(bench, Route.GIVEN, kind, before, FLAT_HEAD)


def _taking_turns(model: Any) -> Iterable[Any]:
    params = list(model.parameters())
    return [{"params": params[0::2], "weight_decay": 0.5}, {"params": params[1::2], "weight_decay": 0.0}]


@BY_SETTINGS
@pytest.mark.kills("PermutesGroups")
@expects("the names of each group", "the options of each group", RESUMED)
def test_resumes_groups_that_take_turns(bench: Bench) -> None:
    first, second = trained(bench, SHARDS, SGD, _taking_turns), fresh(bench, OTHER_UNITS, SGD, _taking_turns)
    groups, names = first.saved()["param_groups"], list(parameters(tower()))
    members = [sorted(group["params"]) for group in groups]
    turns = [sorted(names[0::2]), sorted(names[1::2])]
    bench.same("the names of each group", members, turns)
    bench.same("the options of each group", [group["weight_decay"] for group in groups], [0.5, 0.0])
    if members != turns:
        return  # such groups fit no optimizer
    hand_over(Route.FULL, first, second)
    claim_resumed(second, SGD, _taking_turns)


@parametrize("kind, before", _resumed(SGD, SHARDS), _resumed(ADAMW, WHOLE))
@pytest.mark.kills("RekeysToEachOther")
@pytest.mark.api("rekey_optim_state_dict", "OptimStateKeyType")
@expects("the keys", "the members of the group", "the keys when nothing is to be done", RESUMED)
def test_rekeys_state_by_number_for_a_plain_optimizer(bench: Bench, kind: Kind, before: Wrapping) -> None:
    first, second = trained(bench, before, kind), plain(bench, kind, 0)
    full = bench.api.full_optim_state_dict(first.root, first.optimizer, rank0_only=False)
    second.root.load_state_dict(first.parameters(), strict=False)
    to_plain = (OptimStateKeyType.PARAM_ID, second.root)
    keyed = bench.api.rekey_optim_state_dict(full, *to_plain, optim=second.optimizer)
    numbers = list(range(len(second.parameters())))
    bench.same("the keys", sorted(keyed["state"]), numbers)
    bench.same("the members of the group", sorted(keyed["param_groups"][0]["params"]), numbers)
    again = bench.api.rekey_optim_state_dict(keyed, *to_plain, optim=second.optimizer)
    bench.same("the keys when nothing is to be done", sorted(again["state"]), numbers)
    second.optimizer.load_state_dict(keyed)
    claim_resumed(second, kind)


@pytest.mark.kills("RekeysToEachOther")
@pytest.mark.api("rekey_optim_state_dict", "shard_full_optim_state_dict", "OptimStateKeyType")
@EACH_KIND
@expects("the keys", RESUMED)
def test_rekeys_state_of_a_plain_optimizer_by_name(bench: Bench, kind: Kind) -> None:
    first, second = plain(bench, kind, BEFORE), fresh(bench, SHARDS, kind)
    state, by_name = first.optimizer.state_dict(), OptimStateKeyType.PARAM_NAME
    keyed = bench.api.rekey_optim_state_dict(state, by_name, first.root, optim=first.optimizer)
    bench.same("the keys", sorted(keyed["state"]), sorted(first.parameters()))
    with bench.api.state_dict_type(second.root, FULL):
        second.root.load_state_dict(first.root.state_dict())
    loadable = bench.api.shard_full_optim_state_dict(keyed, second.root, optim=second.optimizer)
    second.optimizer.load_state_dict(loadable)
    claim_resumed(second, kind)


@pytest.mark.kills("NumbersStateByName")
@pytest.mark.api("OptimStateKeyType")
@pytest.mark.worlds(APART)  # as for the form of what is saved
@expects("keys", "ids", "values by id", "values by name")
def test_rekeys_state_by_number_and_back(bench: Bench) -> None:
    first, model = trained(bench, SHARDS, SGD), tower()
    rekey = bench.api.rekey_optim_state_dict
    named = bench.api.full_optim_state_dict(first.root, first.optimizer, rank0_only=False)
    names = list(parameters(model))
    bench.same("keys", sorted(named["state"]), sorted(names))
    # Ids are positions in a model that is not wrapped.
    numbered = rekey(named, OptimStateKeyType.PARAM_ID, model)
    bench.same("ids", sorted(numbered["state"]), list(range(len(names))))
    again = rekey(numbered, OptimStateKeyType.PARAM_NAME, model)
    momenta = {name: named["state"][name]["momentum_buffer"] for name in names}
    by_id = {name: numbered["state"].get(i, {}).get("momentum_buffer") for i, name in enumerate(names)}
    bench.same("values by id", by_id, momenta)
    by_name = {name: state["momentum_buffer"] for name, state in again["state"].items()}
    bench.same("values by name", _sorted(by_name), _sorted(momenta))


def _sorted(values: dict[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in sorted(values)}
