"""Auto wrapping chooses submodules by policies, wraps each once, and replaces it wherever it is registered."""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._wrap_utils import _auto_wrap as torch_auto_wrap

from shardproof.engine.reference import FullyShardedDataParallel
from shardproof.engine.reference.fsdp1 import wrap_policy as wrapping
from shardproof.harness.worlds.rank import RankContext
from tests.reference.ranks import Ranks


class Box(nn.Module):
    """A wrapper that only records its arguments."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.options = options


def _box(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    return Box(module, **options)


def _is_box(module: nn.Module) -> bool:
    return isinstance(module, Box)


class Block(nn.Module):
    """A norm and two layers, 4 * 4 * 2 + 4 * 2 + 8 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Net(nn.Module):
    """Blocks in a list, attention, an embedding that is tied to the head, and a layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(4, 2)
        self.shared = nn.Sequential(nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight


def _wrapped(root: nn.Module) -> list[str]:
    """List the modules in boxes, by their names in the plain model."""
    return [
        name.replace(".module", "").removeprefix("module.")
        for name, module in root.named_modules()
        if isinstance(module, Box)
    ]


def _wrap_below(root: nn.Module, policy: wrapping.WrapPolicy, **options: Any) -> list[str]:
    wrapping.wrap_below(root, policy, wrap=_box, is_wrapped=_is_box, **options)
    return _wrapped(root)


def _by_torch(
    root: nn.Module,
    policy: Any,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
) -> list[str]:
    ignored = {below for module in ignored_modules for below in module.modules()}
    torch_auto_wrap(root, policy, ignored, set(ignored_parameters), {"mixed_precision": None}, Box)
    return _wrapped(root)


def _half_of_linears(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.bias is not None


def _with_options(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, nn.Linear):
        return {"forward_prefetch": True}
    return isinstance(module, Block)


POLICIES: Mapping[str, Any] = {
    "classes": wrapping.ModuleWrapPolicy([Block, nn.Linear]),
    "classes-none-found": wrapping.ModuleWrapPolicy({nn.Conv2d}),
    "custom": wrapping.CustomPolicy(_with_options),
    "always": wrapping.always_wrap_policy,
    "lambda": functools.partial(wrapping.lambda_auto_wrap_policy, lambda_fn=_half_of_linears),
    "transformer": functools.partial(
        wrapping.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.MultiheadAttention}
    ),
    "classes-as-function": functools.partial(wrapping.ModuleWrapPolicy([Block]).__call__),
    "size-20": functools.partial(wrapping.size_based_auto_wrap_policy, min_num_params=20),
    "size-40": functools.partial(wrapping.size_based_auto_wrap_policy, min_num_params=40),
    "size-default": wrapping.size_based_auto_wrap_policy,
    "size-leaf": functools.partial(
        wrapping.size_based_auto_wrap_policy, min_num_params=10, force_leaf_modules={Block}
    ),
    "size-exclude": functools.partial(
        wrapping.size_based_auto_wrap_policy, min_num_params=10, exclude_wrap_modules={nn.Linear}
    ),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def _untied() -> Net:
    model = Net()
    model.head = nn.Linear(4, 9, bias=False)
    return model


@each_policy
def test_policies_choose_as_those_of_torch(policy: Any) -> None:
    assert _wrap_below(_untied(), policy) == _by_torch(_untied(), policy)


@each_policy
def test_ignored_modules_are_skipped_as_by_torch(policy: Any) -> None:
    mine, theirs = _untied(), _untied()
    found = _wrap_below(
        mine,
        policy,
        ignored_modules={mine.blocks[0]},
        ignored_parameters=[mine.get_parameter("blocks.1.layers.0.weight")],
    )
    expected = _by_torch(
        theirs, policy, {theirs.blocks[0]}, [theirs.get_parameter("blocks.1.layers.0.weight")]
    )
    assert found == expected
    assert not any(name.startswith("blocks.0") for name in found)


def test_policies_above_choose_something() -> None:
    assert _wrap_below(_untied(), POLICIES["size-40"]) == ["blocks.0.layers", "blocks.1.layers"]
    assert "blocks.0.layers.0" in _wrap_below(_untied(), POLICIES["always"])
    assert _wrap_below(_untied(), POLICIES["lambda"]) == [
        *(f"blocks.{i}.layers.{j}" for i in range(2) for j in (0, 2)),
        "attention.out_proj",
    ]


def _options(module: nn.Module) -> Mapping[str, Any]:
    assert isinstance(module, Box)
    return module.options


def test_root_is_left_to_the_caller() -> None:
    model = nn.Linear(2, 2)
    assert _wrap_below(model, wrapping.ModuleWrapPolicy({nn.Linear})) == []
    assert _wrap_below(model, wrapping.always_wrap_policy) == []
    assert _wrap_below(model, wrapping.always_wrap_policy, also={model: {"mixed_precision": None}}) == []


@pytest.mark.parametrize("policy", [wrapping.ModuleWrapPolicy({nn.Linear}), wrapping.always_wrap_policy])
def test_module_in_several_places_is_wrapped_once_and_replaced_in_all(policy: wrapping.WrapPolicy) -> None:
    layer = nn.Linear(2, 2)
    inner = nn.Sequential(layer, nn.ReLU(), layer)  # twice in one parent
    model = nn.Sequential(inner, inner, nn.Sequential(layer))  # a parent in two places, and another parent
    _wrap_below(model, policy)
    found = {id(module) for module in model.modules() if _is_box(module) and module.module is layer}
    assert len(found) == 1
    places = [module for _, module in model.named_modules(remove_duplicate=False) if module is layer]
    assert len(places) == 5
    assert all(
        isinstance(parent, Box) or layer not in parent.children()
        for parent in model.modules()
        if parent is not layer
    )


def test_tied_parameters_count_once_for_a_policy_that_goes_by_size() -> None:
    policy = functools.partial(wrapping.size_based_auto_wrap_policy, min_num_params=36)
    model = Net()
    model.blocks = nn.ModuleList()
    assert _wrap_below(model, policy) == ["embedding"]  # and not the head, of which nothing is left


def test_wrapped_modules_are_refused_before_anything_is_replaced() -> None:
    model = _untied()
    model.blocks[1].norm = Box(model.get_submodule("blocks.1.norm"))
    with pytest.raises(ValueError, match=r"not already have FSDP applied, got submodule 'blocks\.1\.norm'"):
        _wrap_below(model, wrapping.always_wrap_policy)
    assert _wrapped(model) == ["blocks.1.norm"]
    with pytest.raises(ValueError, match="the module itself"):
        _wrap_below(Box(nn.Linear(2, 2)), wrapping.always_wrap_policy)


def test_something_that_is_no_policy_is_refused() -> None:
    no_policy: Any = {nn.Linear}
    with pytest.raises(TypeError, match="auto_wrap_policy: expected a function or a policy object"):
        _wrap_below(Net(), no_policy)


def test_modules_named_apart_are_wrapped_under_any_policy() -> None:
    for policy in (wrapping.ModuleWrapPolicy({Block}), lambda module, recurse, nonwrapped_numel: False):
        model = Net()
        norms = {block.norm: {"mixed_precision": None} for block in model.blocks}
        found = _wrap_below(model, policy, also=norms, ignored_modules=[model.blocks[1]])
        assert "blocks.0.norm" in found
        assert "blocks.1.norm" not in found
        assert _options(
            model.get_submodule("blocks.0.norm" if "blocks.0" not in found else "blocks.0.module.norm")
        ) == {"mixed_precision": None}


def test_options_of_a_policy_reach_the_wrapper() -> None:
    model = _untied()
    _wrap_below(model, wrapping.CustomPolicy(_with_options))
    assert _options(model.head) == {"forward_prefetch": True}
    assert _options(model.blocks[0]) == {}


def test_options_of_modules_named_apart_go_before_those_of_the_policy() -> None:
    model = _untied()
    options = {"mixed_precision": "half", "forward_prefetch": True}
    _wrap_below(model, wrapping.CustomPolicy(lambda m: options), also={model.head: {"mixed_precision": None}})
    assert _options(model.head) == {"mixed_precision": None, "forward_prefetch": True}
    assert options == {"mixed_precision": "half", "forward_prefetch": True}


# --- wrapping by hand ---------------------------------------------------------------------------------------------


def test_wrap_outside_of_any_context_returns_the_module_unchanged() -> None:
    layer = nn.Linear(2, 2)
    assert wrapping.wrap(layer) is layer
    with pytest.raises(KeyError), wrapping.enable_wrap(wrapper_cls=Box):
        raise KeyError
    assert wrapping.wrap(layer) is layer


def test_options_of_wrap_go_before_those_of_the_context() -> None:
    with wrapping.enable_wrap(wrapper_cls=Box, a=1, b=2):
        assert _options(wrapping.wrap(nn.Linear(2, 2), b=3)) == {"a": 1, "b": 3}
        assert _options(wrapping.wrap(nn.Linear(2, 2))) == {"a": 1, "b": 2}


def test_inner_context_stands_alone_and_ends_before_the_outer() -> None:
    with wrapping.enable_wrap(wrapper_cls=Box, a=1):
        with wrapping.enable_wrap(wrapper_cls=Box, b=2):
            assert _options(wrapping.wrap(nn.Linear(2, 2))) == {"b": 2}
        assert _options(wrapping.wrap(nn.Linear(2, 2))) == {"a": 1}


def test_ranks_that_are_threads_have_contexts_of_their_own() -> None:
    both_inside = threading.Barrier(3, timeout=20)
    seen: dict[int, Mapping[str, Any]] = {}

    def build(rank: int) -> None:
        with wrapping.enable_wrap(wrapper_cls=Box, rank=rank):
            both_inside.wait()
            seen[rank] = _options(wrapping.wrap(nn.Linear(2, 2)))
            both_inside.wait()

    ranks = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    both_inside.wait()
    layer = nn.Linear(2, 2)
    outside = wrapping.wrap(layer)
    both_inside.wait()
    for thread in ranks:
        thread.join(timeout=20)
    assert seen == {0: {"rank": 0}, 1: {"rank": 1}}
    assert outside is layer


# --- what a wrapper tells of itself -------------------------------------------------------------------------------

_GIVEN: Mapping[str, Any] = {  # Any: options of any type
    "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    "cpu_offload": CPUOffload(),
    "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
    "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
    "forward_prefetch": True,
    "limit_all_gathers": False,
}


def _tell(context: RankContext, of_torch: bool) -> None:
    # Any: the two classes share no base.
    wrapper: Any = torch.distributed.fsdp.FullyShardedDataParallel if of_torch else FullyShardedDataParallel
    model = wrapper(nn.Linear(2, 2), device_id=torch.device("cpu"), **_GIVEN)
    assert {name: getattr(model, name) for name in _GIVEN} == _GIVEN
    assert (model.rank, model.world_size) == (context.rank, context.size)
    assert model.process_group.size() == context.size
    assert model.compute_device == torch.device("cpu")


@pytest.mark.parametrize("of_torch", [True, False], ids=["torch", "reference"])
def test_wrapper_tells_what_it_was_given(of_torch: bool, ranks: Ranks) -> None:
    ranks.run(2, _tell, of_torch)


def _half_frozen(context: RankContext) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match="10 elements are reduced for 4 that are trained"):
        FullyShardedDataParallel(model, use_orig_params=True)


def test_wrapper_of_frozen_and_trained_parameters_warns_of_what_it_reduces(ranks: Ranks) -> None:
    ranks.run(1, _half_frozen)
