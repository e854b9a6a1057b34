"""sharding_strategy, process_group, device_mesh, ignored parameters, cpu_offload; and options that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL
from shardproof.suites.params import param, parametrize
from shardproof.suites.wrapper.expect import STEP, Bench, expects
from shardproof.suites.tower import Tower, batch, shown_gradients, tower

FULL, ZERO2, NO = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy["_HYBRID_SHARD_ZERO2"]
IGNORED = "ignored parameters are the same objects"
IGNORED_GRADIENTS = "gradients of ignored parameters are the rank's own"
KEEPS = "KeepsWhatTheStrategyFrees"
FREES = ("FreesWhatTheStrategyKeeps", "ShowsShardsOfWhatItKeeps")
api, kills = pytest.mark.api, pytest.mark.kills
in_replicas = pytest.mark.worlds(FOUR_OR_MORE_EVEN)


def _shown(strategy: ShardingStrategy, between: str, outside: str, *mutants: str) -> Any:
    marks = [kills(*mutants), api(f"ShardingStrategy.{strategy.name}")]
    marks += [in_replicas] if strategy in {HYBRID, HYBRID_ZERO2} else []
    return param(strategy, between, outside, id=strategy.name.strip("_").lower(), marks=marks)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.api("sharding_strategy")
@parametrize(
    "strategy, between, outside",
    param(None, "sharded", "sharded", id="default", marks=kills(KEEPS)),
    _shown(FULL, "sharded", "sharded", KEEPS),
    _shown(ZERO2, "whole", "sharded", *FREES),
    _shown(NO, "whole", "whole", "ShardsWhatTheStrategyReplicates"),
    _shown(HYBRID, "sharded", "sharded", KEEPS),
    _shown(HYBRID_ZERO2, "whole", "sharded", *FREES),
)
@expects("before forward", "after forward", "after backward")
def test_shards_and_frees_as_the_strategy_says(
    bench: Bench, strategy: ShardingStrategy | None, between: str, outside: str
) -> None:
    model = tower()
    layer: Any = model.middle[0]
    whole = layer.weight.shape
    options: dict[str, Any] = {} if strategy is None else {"sharding_strategy": strategy}
    if strategy in {HYBRID, HYBRID_ZERO2}:
        options["device_mesh"] = bench.mesh(2)
    root = bench.wrapped(model, **options)

    def look(moment: str, expected: str) -> None:
        used_and_listed = [layer.weight.shape == whole, next(layer.parameters()).shape == whole]
        bench.same(
            moment, ["whole" if is_whole else "sharded" for is_whole in used_and_listed], [expected] * 2
        )

    look("before forward", outside)
    output = root(batch(bench.rank))
    look("after forward", between)
    output.sum().backward()
    look("after backward", outside)


@in_replicas
@parametrize(
    "kind",
    param("group", marks=[kills("IgnoresTheGroupGiven"), api("process_group")]),
    param("mesh", marks=[kills("IgnoresTheMeshGiven"), api("device_mesh")]),
)
@expects(STEP)
def test_shards_over_the_ranks_given(bench: Bench, kind: str) -> None:
    """Over half of the ranks: sharding and averaging stay among them."""
    half = bench.size // 2
    inner = bench.mesh(2)["shard"]
    options: dict[str, Any] = (
        {"process_group": inner.get_group()} if kind == "group" else {"device_mesh": inner}
    )
    first = bench.rank // half * half
    bench.step_of(range(first, first + half), **options)


@pytest.mark.kills("NeverMeetsReplicas")
@in_replicas
@parametrize(
    "kind, strategy",
    param("groups", HYBRID, id="groups-freed", marks=api("process_group")),
    param("mesh", HYBRID, id="mesh-freed", marks=api("device_mesh")),
    param("groups", HYBRID_ZERO2, id="groups-kept", marks=api("process_group")),
    param("mesh", HYBRID_ZERO2, id="mesh-kept", marks=api("device_mesh")),
)
@expects(STEP, "whether each replica holds the model once")
def test_trains_one_model_in_two_replicas(bench: Bench, kind: str, strategy: ShardingStrategy) -> None:
    half = bench.size // 2
    ranks = bench.mesh(2)
    groups = (ranks.get_group("shard"), ranks.get_group("replicate"))
    options: dict[str, Any] = {"process_group": groups} if kind == "groups" else {"device_mesh": ranks}
    policy = bench.names.ModuleWrapPolicy({nn.Sequential})
    root = bench.step_of(bench.ranks, auto_wrap_policy=policy, sharding_strategy=strategy, **options)
    total = sum(p.numel() for p in tower().parameters())
    (held,) = bench.summed([sum(p.numel() for p in root.parameters())])
    is_once = 2 * total <= held <= 2 * (total + 16 * half)  # flat parameters are padded
    bench.same("whether each replica holds the model once", is_once, True)


@pytest.mark.kills("ForgetsWhatToIgnore")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "option",
    param("ignored_modules", id="modules", marks=api("ignored_modules")),
    param("ignored_states", id="states", marks=api("ignored_states")),
)
@expects("units", IGNORED, IGNORED_GRADIENTS)
def test_leaves_ignored_modules_alone(bench: Bench, option: str) -> None:
    model = tower().to(bench.device)
    root = _ignore_head(bench, model, **{option: [model.head]})
    bench.same("units", bench.units_of(root), ["", "middle.0", "middle.1", "stem"])


@pytest.mark.kills("ForgetsWhatToIgnore")
@pytest.mark.api("ignored_states")
@pytest.mark.worlds(SEVERAL)
@expects(IGNORED, IGNORED_GRADIENTS)
def test_leaves_ignored_parameters_alone(bench: Bench) -> None:
    model = tower().to(bench.device)
    _ignore_head(bench, model, ignored_states=list(model.head.parameters()))


# Any: options of the wrapper, and the wrapper.
def _ignore_head(bench: Bench, model: Tower, **options: Any) -> Any:
    """Wrap each layer but the head, and claim that the head is as it would be without a wrapper."""
    plain, head = tower(), model.head
    before = list(head.parameters())
    root = bench.wrap(model, auto_wrap_policy=bench.names.ModuleWrapPolicy({nn.Linear}), **options)
    bench.same(IGNORED, [p is q for p, q in zip(before, head.parameters(), strict=True)], [True, True])
    root(batch(bench.rank)).sum().backward()
    plain(batch(bench.rank)).sum().backward()
    bench.same(IGNORED_GRADIENTS, shown_gradients(head), shown_gradients(plain.head))
    return root


@pytest.mark.kills("ReadsOffloadedGradientsTooEarly")
@pytest.mark.api("cpu_offload", "CPUOffload")
@expects(STEP, "devices between steps")
def test_keeps_what_is_offloaded_on_the_host(bench: Bench) -> None:
    root = bench.step_of(bench.ranks, cpu_offload=CPUOffload(offload_params=True))
    homes = {t.device.type for p in root.parameters() for t in (p, p.grad) if t is not None}
    bench.same("devices between steps", homes, {"cpu"})


def _without_memory(_: Bench, model: Tower) -> dict[str, Any]:
    model.to("meta")
    return {"param_init_fn": "zeros"}


def _wrapped_before(bench: Bench, model: Tower) -> dict[str, Any]:
    model.middle = bench.wrap(model.middle)
    return {"auto_wrap_policy": bench.names.ModuleWrapPolicy({nn.Sequential})}


def _frozen_in_part(bench: Bench, model: Tower) -> dict[str, Any]:
    model.middle[0].requires_grad_(False)
    return {"auto_wrap_policy": bench.names.ModuleWrapPolicy({nn.Sequential}), "use_orig_params": False}


# Each makes the options for a model, which it may change before.
_ATTEMPTS: dict[str, Callable[[Bench, Tower], dict[str, Any]]] = {
    "groups and mesh": lambda bench, _: {
        "process_group": bench.mesh().get_group(),
        "device_mesh": bench.mesh(),
    },
    "ignored twice": lambda _, model: {"ignored_modules": [model.head], "ignored_states": [model.stem]},
    "ignored mixture": lambda _, model: {"ignored_states": [model.head, model.stem.weight]},
    "ignored parameters as modules": lambda _, model: {"ignored_modules": [model.head.weight]},
    "hybrid on one axis": lambda bench, _: {"sharding_strategy": HYBRID, "device_mesh": bench.mesh()},
    "hybrid in one group": lambda bench, _: {
        "sharding_strategy": HYBRID,
        "process_group": bench.mesh().get_group(),
    },
    "hybrid nowhere": lambda *_: {"sharding_strategy": HYBRID},
    "initialiser": _without_memory,
    "policy of numbers": lambda bench, _: {"auto_wrap_policy": bench.names.CustomPolicy(lambda module: 3)},
    "wrapped before": _wrapped_before,
    "frozen in part": _frozen_in_part,
}


def _attempt(name: str, *about: str, mutant: str = "AcceptsContradictions") -> Any:
    return param(name, id=name.replace(" ", "-"), marks=[api(*about), kills(mutant)])


@parametrize(
    "attempt",
    _attempt("groups and mesh", "process_group", "device_mesh"),
    _attempt("ignored twice", "ignored_modules", "ignored_states"),
    _attempt("ignored mixture", "ignored_states"),
    _attempt("ignored parameters as modules", "ignored_modules"),
    _attempt("hybrid on one axis", "device_mesh", "sharding_strategy"),
    _attempt("hybrid in one group", "process_group", "sharding_strategy"),
    _attempt("hybrid nowhere", "sharding_strategy"),
    _attempt("initialiser", "param_init_fn"),
    _attempt("policy of numbers", "auto_wrap_policy", "CustomPolicy", mutant="IgnoresOverridesOfAPolicy"),
    _attempt("wrapped before", "auto_wrap_policy"),
    _attempt("frozen in part", "use_orig_params", "auto_wrap_policy"),
)
@expects("the attempt")
def test_refuses_what_has_no_meaning(bench: Bench, attempt: str) -> None:
    model = tower()
    options = _ATTEMPTS[attempt](bench, model)
    bench.refuses("the attempt", lambda: bench.wrap(model, **options), ValueError)
