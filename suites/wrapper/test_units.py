"""Which modules are units: policies, ``wrap``, the list of units, the root, and the warning of bare containers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from shardproof import ALONE, SEVERAL, WrapperNames
from shardproof.suites.params import param, parametrize
from shardproof.suites.wrapper.expect import STEP, Bench, expects
from shardproof.suites.tower import batch, tower

MIDDLE = ["", "middle"]
ASKED = "modules that the policy is asked about, with their parameters that are in no unit yet"
LAYERS = ["", "middle.1", "stem"]
ALL = ["", "head", "middle", "middle.0", "middle.1", "stem"]


def _is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 5


def _is_sequence(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, nn.Sequential)


# Any: policies have no common base class.
_POLICIES: dict[str, Callable[[WrapperNames], Any]] = {
    "none": lambda names: None,
    "function": lambda names: _is_sequence,
    "classes": lambda names: names.ModuleWrapPolicy({nn.Sequential}),
    "nested": lambda names: names.ModuleWrapPolicy({nn.Sequential, nn.Linear}),
    "custom": lambda names: names.CustomPolicy(_is_wide),
    "lambda": lambda names: partial(names.lambda_auto_wrap_policy, lambda_fn=_is_wide),
    "transformer": lambda names: partial(
        names.transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}
    ),
    # The middle has 35 parameters, and layers have 20 at most.
    "large": lambda names: partial(names.size_based_auto_wrap_policy, min_num_params=35),
    # Without its second layer, the middle is too small to be a unit.
    "small": lambda names: partial(names.size_based_auto_wrap_policy, min_num_params=20),
}


def _policy(name: str, units: list[str], *api: str, kills: str = "IgnoresThePolicy") -> Any:
    return param(name, units, id=name, kills=kills, marks=pytest.mark.api("auto_wrap_policy", *api))


@parametrize(
    "policy, units",
    _policy("none", [""], kills="WrapsLayersUnasked"),
    _policy("function", MIDDLE),
    _policy("classes", MIDDLE, "ModuleWrapPolicy"),
    _policy("nested", ALL, "ModuleWrapPolicy"),
    _policy("custom", LAYERS, "CustomPolicy"),
    _policy("lambda", LAYERS, "lambda_auto_wrap_policy"),
    _policy("transformer", MIDDLE, "transformer_auto_wrap_policy"),
    _policy("large", MIDDLE, "size_based_auto_wrap_policy"),
    _policy("small", LAYERS, "size_based_auto_wrap_policy"),
)
@expects("units", STEP)
def test_makes_the_units_that_the_policy_names(bench: Bench, policy: str, units: list[str]) -> None:
    root = bench.step_of(bench.ranks, auto_wrap_policy=_POLICIES[policy](bench.names))
    bench.same("units", bench.units_of(root), units)


@pytest.mark.kills("IgnoresThePolicy")
@pytest.mark.api("auto_wrap_policy", "always_wrap_policy")
@expects("units")
def test_makes_a_unit_of_every_module(bench: Bench) -> None:
    root = bench.wrap(tower(), auto_wrap_policy=bench.names.always_wrap_policy)
    bench.same("units", bench.units_of(root), ALL)


@pytest.mark.kills("IgnoresThePolicy")
@pytest.mark.api("auto_wrap_policy")
@expects(ASKED)
def test_asks_a_policy_from_the_leaves_up(bench: Bench) -> None:
    middle = tower().middle
    model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(middle, nn.Linear(5, 2)))
    known = {module: name for name, module in model.named_modules()}
    asked: list[str] = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if not recurse:
            asked.append(f"{known[module]} {nonwrapped_numel}")
        return recurse or module is middle

    bench.wrap(model, auto_wrap_policy=policy)
    bench.same(ASKED, asked, ["0 20", "1.0.0 15", "1.0.1 20", "1.0 35", "1.1 12", "1 12"])


@pytest.mark.kills("AlwaysShowsNames")
@pytest.mark.api("auto_wrap_policy", "mixed_precision", "sharding_strategy", "use_orig_params")
@expects("dtypes inside", "kept inside", "flat inside")
def test_units_have_the_options_of_the_root(bench: Bench) -> None:
    model = tower()
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    wrap_all = partial(bench.wrap, auto_wrap_policy=bench.names.ModuleWrapPolicy({nn.Sequential}))
    inside: Any = model.middle[0]
    root = wrap_all(model, mixed_precision=low, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    dtypes: list[torch.dtype] = []
    inside.register_forward_pre_hook(lambda *_: dtypes.append(inside.weight.dtype))
    output = root(batch(bench.rank))
    bench.same("dtypes inside", dtypes, [torch.bfloat16])
    bench.same("kept inside", inside.weight.dim(), 2)
    output.sum().backward()
    flat = wrap_all(tower(), use_orig_params=False)
    are_flat = [isinstance(p, bench.names.FlatParameter) for p in flat.parameters()]
    bench.same("flat inside", are_flat, [True, True])


@pytest.mark.kills("IgnoresOverridesOfAPolicy", "IgnoresThePolicy")
@pytest.mark.api("auto_wrap_policy", "CustomPolicy")
@pytest.mark.worlds(SEVERAL)  # a lone rank frees nothing
@expects("kept after forward", "units")
def test_a_policy_overrides_options_of_one_unit(bench: Bench) -> None:
    model = tower()
    kept: Any = model.stem
    freed: Any = model.middle[1]
    own = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    policy = bench.names.CustomPolicy(lambda module: own if module is kept else module is freed)
    root = bench.wrap(model, auto_wrap_policy=policy)
    output = root(batch(bench.rank))
    bench.same("kept after forward", [layer.weight.dim() == 2 for layer in (kept, freed)], [True, False])
    output.sum().backward()
    bench.same("units", bench.units_of(root), LAYERS)


# Torch keeps the options of enable_wrap in one place for all threads: ranks that are threads would share them.
@pytest.mark.worlds(ALONE)
@pytest.mark.kills("AlwaysShowsNames")
@pytest.mark.api("enable_wrap", "wrap")
@expects("outside", "inside", "parameters inside", "parameters with an option overridden", "outside again")
def test_wraps_what_is_annotated(bench: Bench) -> None:
    layer = nn.Linear(2, 2)
    bench.same("outside", bench.names.wrap(layer) is layer, True)
    with bench.names.enable_wrap(wrapper_cls=bench.api, device_id=bench.device, use_orig_params=False):
        inside = bench.names.wrap(nn.Linear(2, 2))
        overridden = bench.names.wrap(nn.Linear(2, 2), use_orig_params=True)
    bench.same("inside", bench.api.fsdp_modules(inside) == [inside], True)
    bench.same("parameters inside", len(list(inside.parameters())), 1)
    bench.same("parameters with an option overridden", len(list(overridden.parameters())), 2)
    bench.same("outside again", bench.names.wrap(layer) is layer, True)


# Warnings are caught for all threads of a process: ranks that are threads would catch each other's.
@pytest.mark.worlds(ALONE)
@pytest.mark.kills("WrapsContainersSilently")
@pytest.mark.api("init.module")
@parametrize("is_dict", False, True, ids=["list", "dict"])
@expects("warned of a container", "warned of a module")
def test_warns_of_containers_without_a_forward(bench: Bench, is_dict: bool) -> None:
    bare = nn.ModuleDict({"layer": nn.Linear(2, 2)}) if is_dict else nn.ModuleList([nn.Linear(2, 2)])
    for subject, module in (("warned of a container", bare), ("warned of a module", nn.Linear(2, 2))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bench.wrap(module)
        is_warned = any("Module" in str(warning.message) for warning in caught)
        bench.same(subject, is_warned, module is bare)


@pytest.mark.api("check_is_root")
@pytest.mark.kills("KnowsNoRootBeforeForward")
@expects("the root before forward", "the root after forward", "a unit that is asked first")
def test_tells_which_unit_is_the_root(bench: Bench) -> None:
    root = bench.wrapped(tower())
    units = [root, root.middle, root.middle[1]]
    bench.same("the root before forward", [unit.check_is_root() for unit in units], [True, False, False])
    root(batch(bench.rank))
    bench.same("the root after forward", [unit.check_is_root() for unit in units], [True, False, False])
    alone = bench.wrapped(tower(), units=("head",))
    bench.same("a unit that is asked first", alone.head.check_is_root(), True)


@pytest.mark.api("fsdp_modules")
@pytest.mark.kills("TakesUnitsForRoots")
@expects("all units", "the units of a unit", "the root alone", "their class")
def test_lists_units_in_the_order_of_modules(bench: Bench) -> None:
    root = bench.wrapped(tower())
    units = [root, root.middle, root.middle[1]]
    bench.same("all units", _places(units, bench.api.fsdp_modules(root)), [0, 1, 2])
    bench.same("the units of a unit", _places(units, bench.api.fsdp_modules(root.middle)), [1, 2])
    bench.same("the root alone", _places(units, bench.api.fsdp_modules(root, root_only=True)), [0])
    bench.same("their class", {type(unit) for unit in bench.api.fsdp_modules(root)}, {bench.api})


@pytest.mark.api("fsdp_modules")
@pytest.mark.kills("TakesUnitsForRoots")
@expects("all units below", "the roots below", "units of a model without")
def test_lists_units_of_a_model_that_is_not_wrapped_itself(bench: Bench) -> None:
    first, second = bench.wrapped(tower(), units=("middle",)), bench.wrapped(tower(), units=())
    plain = nn.ModuleDict({"first": first, "between": nn.Linear(2, 2), "second": second})
    units = [first, first.middle, second]
    bench.same("all units below", _places(units, bench.api.fsdp_modules(plain)), [0, 1, 2])
    bench.same("the roots below", _places(units, bench.api.fsdp_modules(plain, root_only=True)), [0, 2])
    bench.same("units of a model without", bench.api.fsdp_modules(nn.Linear(2, 2)), [])


def _places(units: list[Any], found: list[Any]) -> list[int]:
    """Return units by their positions in a list: records must be the same on every rank."""
    return [next((i for i, unit in enumerate(units) if unit is other), -1) for other in found]
