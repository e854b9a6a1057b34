"""Which modules the wrapper makes units of, and with what options."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fixtures.tower import WIDTH, Block, Tower, rows
from shardproof import InterfaceBench, WrapperNames
from suites.wrapper.exercises.wrapped import takes_the_step_of, units_of, wrap

__all__ = [
    "UNITS",
    "asks_from_the_leaves_up",
    "hands_down_options",
    "overrides_options_of_one",
    "warns_of_containers",
    "wraps_as_annotated",
    "wraps_by_policy",
    "wraps_everything",
]

UNITS = "units"


def _is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == WIDTH


def _is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


# Any: policies share no base class.
_POLICIES: dict[str, Callable[[WrapperNames], Any]] = {
    "none": lambda names: None,
    "a function": lambda names: _is_block,
    "classes": lambda names: names.ModuleWrapPolicy({Block}),
    "nested classes": lambda names: names.ModuleWrapPolicy({Block, nn.Linear}),
    "custom": lambda names: names.CustomPolicy(_is_wide),
    "lambda": lambda names: partial(names.lambda_auto_wrap_policy, lambda_fn=_is_wide),
    "transformer": lambda names: partial(names.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size of a block": lambda names: partial(names.size_based_auto_wrap_policy, min_num_params=97),
    "size of a layer": lambda names: partial(names.size_based_auto_wrap_policy, min_num_params=49),
}


def wraps_by_policy(bench: InterfaceBench, policy: str) -> None:
    """Wrap a tower by a policy, and train it."""
    root = takes_the_step_of(bench, range(bench.size), auto_wrap_policy=_POLICIES[policy](bench.names))
    bench.note(UNITS, units_of(bench, root, Tower()))


def wraps_everything(bench: InterfaceBench) -> None:
    """Wrap every module of a block, which has no bare list of modules to be warned of."""
    root = wrap(bench, Block(), auto_wrap_policy=bench.names.always_wrap_policy)
    bench.note(UNITS, units_of(bench, root, Block()))


def asks_from_the_leaves_up(bench: InterfaceBench) -> None:
    """Note of which modules a policy is asked whether they are units, and how much no unit has yet."""
    model = Tower()
    known = {module: name for name, module in model.named_modules()}
    asked: list[str] = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if not recurse:
            asked.append(f"{known[module]} {nonwrapped_numel}")
        return recurse or isinstance(module, Block)

    wrap(bench, model, auto_wrap_policy=policy)
    bench.note("asked", ", ".join(asked))


def hands_down_options(bench: InterfaceBench) -> None:
    """Give options to the root, and note what becomes of them in a unit inside."""
    model = Tower()
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    wrap_all = partial(wrap, bench, auto_wrap_policy=bench.names.ModuleWrapPolicy({Block}))
    strategy = ShardingStrategy.SHARD_GRAD_OP
    root = wrap_all(model, mixed_precision=low, sharding_strategy=strategy)
    inside, _ = model.layers()
    inside.register_forward_pre_hook(lambda *_: bench.note("dtype inside", inside.weight.dtype))
    output = root(rows(bench.rank).to(bench.device))
    bench.note("kept inside", inside.weight.dim() == 2)
    output.sum().backward()
    flat = wrap_all(Tower(), use_orig_params=False)
    bench.note("flat inside", all(isinstance(p, bench.names.FlatParameter) for p in flat.parameters()))


def overrides_options_of_one(bench: InterfaceBench) -> None:
    """Keep one block after forward, the root's option being to free."""
    model = Tower()
    kept = model.blocks[0]
    own = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    policy = bench.names.CustomPolicy(lambda module: own if module is kept else isinstance(module, Block))
    root = wrap(bench, model, auto_wrap_policy=policy)
    output = root(rows(bench.rank).to(bench.device))
    bench.note("kept after forward", [layer.weight.dim() == 2 for layer in model.layers()])
    output.sum().backward()
    bench.note(UNITS, units_of(bench, root, Tower()))


def wraps_as_annotated(bench: InterfaceBench) -> None:
    """Note what wrap does outside of enable_wrap, inside with its options, and with options of its own."""
    names = bench.names
    layer = nn.Linear(2, 2)
    bench.note("outside", names.wrap(layer) is layer)
    with names.enable_wrap(
        wrapper_cls=names.FullyShardedDataParallel, device_id=bench.device, use_orig_params=False
    ):
        inside = names.wrap(nn.Linear(2, 2))
        overridden = names.wrap(nn.Linear(2, 2), use_orig_params=True)
    bench.note("inside", names.FullyShardedDataParallel.fsdp_modules(inside) == [inside])
    bench.note("parameters inside", len(list(inside.parameters())))
    bench.note("parameters with an option overridden", len(list(overridden.parameters())))
    bench.note("outside again", names.wrap(layer) is layer)


def warns_of_containers(bench: InterfaceBench, is_dict: bool) -> None:
    """Note whether wrapping a bare list or dict of modules, and then a plain module, is warned of."""
    bare = nn.ModuleDict({"layer": nn.Linear(2, 2)}) if is_dict else nn.ModuleList([nn.Linear(2, 2)])
    for subject, module in (("warned of a container", bare), ("warned of a module", nn.Linear(2, 2))):
        # The case has one rank, so nobody else is heard.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap(bench, module)
        bench.note(subject, any("Module" in str(warning.message) for warning in caught))
