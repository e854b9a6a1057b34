"""Arguments of the wrapper that have no right meaning, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fixtures.tower import Block, Tower
from shardproof import InterfaceBench
from suites.wrapper.exercises.wrapped import raised, wrap

__all__ = ["REFUSAL", "refuses"]

REFUSAL = "refused with"
_HYBRID = ShardingStrategy.HYBRID_SHARD


def _mesh(bench: InterfaceBench) -> DeviceMesh:
    return init_device_mesh(bench.device.type, (bench.size,))


def _group(bench: InterfaceBench) -> dist.ProcessGroup:
    return _mesh(bench).get_group()


def _groups_and_mesh(bench: InterfaceBench) -> object:
    return wrap(bench, Tower(), process_group=_group(bench), device_mesh=_mesh(bench))


def _ignored_twice(bench: InterfaceBench) -> object:
    model = Tower()
    return wrap(bench, model, ignored_modules=[model.head], ignored_states=[model.stem])


def _ignored_mixture(bench: InterfaceBench) -> object:
    model = Tower()
    return wrap(bench, model, ignored_states=[model.head, model.stem.weight])


def _ignored_parameters_as_modules(bench: InterfaceBench) -> object:
    model = Tower()
    return wrap(bench, model, ignored_modules=[model.head.weight])


def _hybrid_on_one_axis(bench: InterfaceBench) -> object:
    return wrap(bench, Tower(), sharding_strategy=_HYBRID, device_mesh=_mesh(bench))


def _hybrid_in_one_group(bench: InterfaceBench) -> object:
    return wrap(bench, Tower(), sharding_strategy=_HYBRID, process_group=_group(bench))


def _hybrid_nowhere(bench: InterfaceBench) -> object:
    return wrap(bench, Tower(), sharding_strategy=_HYBRID)


def _initialiser(bench: InterfaceBench) -> object:
    return wrap(bench, nn.Linear(2, 2, device="meta"), param_init_fn="zeros")


def _policy_of_numbers(bench: InterfaceBench) -> object:
    return wrap(bench, Tower(), auto_wrap_policy=bench.names.CustomPolicy(lambda module: 3))


def _wrapped_before(bench: InterfaceBench) -> object:
    model = Tower()
    model.blocks[0] = wrap(bench, model.blocks[0])
    return wrap(bench, model, auto_wrap_policy=bench.names.ModuleWrapPolicy({Block}))


def _frozen_in_part(bench: InterfaceBench) -> object:
    model = Tower()
    model.blocks[0].first.requires_grad_(False)
    policy = bench.names.ModuleWrapPolicy({Block})
    return wrap(bench, model, auto_wrap_policy=policy, use_orig_params=False)


_ATTEMPTS: dict[str, Callable[[InterfaceBench], object]] = {
    "groups and mesh": _groups_and_mesh,
    "ignored twice": _ignored_twice,
    "ignored mixture": _ignored_mixture,
    "ignored parameters as modules": _ignored_parameters_as_modules,
    "hybrid on one axis": _hybrid_on_one_axis,
    "hybrid in one group": _hybrid_in_one_group,
    "hybrid nowhere": _hybrid_nowhere,
    "initialiser": _initialiser,
    "policy of numbers": _policy_of_numbers,
    "wrapped before": _wrapped_before,
    "frozen in part": _frozen_in_part,
}


def refuses(bench: InterfaceBench, attempt: str) -> None:
    """Try, and note what became of it."""
    bench.note(REFUSAL, raised(lambda: _ATTEMPTS[attempt](bench), ValueError))
