"""What the wrapper shows of parameters, before, between and after forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from fixtures.tower import Block, Tower, rows
from shardproof import InterfaceBench
from suites.wrapper.exercises.wrapped import clean, same, takes_the_step_of, units_of, wrap

__all__ = [
    "IGNORED",
    "NAMES",
    "SUMS",
    "ignores",
    "keeps_on_the_host",
    "shards_over_a_group",
    "shows_flat",
    "shows_pieces",
    "shows_states",
    "trains_in_replicas",
]

NAMES = "names of parameters as the model has them"
SUMS = "numbers of elements over ranks as the model has them"
IGNORED = "ignored parameters as they were"


def _sum_over_ranks(bench: InterfaceBench, numbers: list[int]) -> list[int]:
    total = torch.tensor(numbers, device=bench.device)
    dist.all_reduce(total)
    return [int(number) for number in total]


def shows_pieces(bench: InterfaceBench) -> None:
    """With use_orig_params each rank has 1-D pieces by the old names, which make up the parameters."""
    plain = dict(Tower().named_parameters())
    root = wrap(bench, Tower(), auto_wrap_policy=bench.names.ModuleWrapPolicy({Block}))
    shown = {clean(name): p for name, p in root.named_parameters()}
    bench.note(NAMES, list(shown) == list(plain))
    bench.note("dims of pieces", sorted({p.dim() for p in shown.values()}))
    sizes = _sum_over_ranks(bench, [p.numel() for p in shown.values()])
    bench.note(SUMS, sizes == [p.numel() for p in plain.values()])


def shows_flat(bench: InterfaceBench) -> None:
    """Without use_orig_params each unit has one flat parameter, of which each rank has its padded part."""
    model = Tower()
    sizes = Counter(_unit_of(name) for name, p in model.named_parameters() for _ in range(p.numel()))
    root = wrap(bench, model, auto_wrap_policy=bench.names.ModuleWrapPolicy({Block}), use_orig_params=False)
    shown = {clean(name): p for name, p in root.named_parameters()}
    bench.note("number of flat parameters", len(shown))
    flat = bench.names.FlatParameter
    bench.note("all parameters are flat", all(isinstance(p, flat) and p.dim() == 1 for p in shown.values()))
    got = _sum_over_ranks(bench, sorted(p.numel() for p in shown.values()))
    # A flat parameter is padded so that each rank has as much of it; NO_SHARD, for one rank, pads nothing.
    bench.note(
        SUMS, all(0 <= g - s < 16 * bench.size for g, s in zip(got, sorted(sizes.values()), strict=True))
    )


def _unit_of(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""


def shows_states(bench: InterfaceBench, strategy: ShardingStrategy | None) -> None:
    """Note of one unit whether it is whole: before forward, after it, and after backward."""
    model = Tower()
    root = wrap(
        bench, model, **_over(bench, strategy), auto_wrap_policy=bench.names.ModuleWrapPolicy({Block})
    )
    layer, _ = model.layers()
    shape = tuple(Block().first.weight.shape)

    def look(moment: str) -> None:
        bench.note(moment, "whole" if tuple(layer.weight.shape) == shape else "sharded")

    look("before forward")
    output = root(rows(bench.rank).to(bench.device))
    look("after forward")
    output.sum().backward()
    look("after backward")


# Any: options of the wrapper.
def _over(bench: InterfaceBench, strategy: ShardingStrategy | None) -> dict[str, Any]:
    if strategy is None:
        return {}
    if "HYBRID" not in strategy.name:
        return {"sharding_strategy": strategy}
    mesh = init_device_mesh(bench.device.type, (2, bench.size // 2), mesh_dim_names=("replicate", "shard"))
    return {"sharding_strategy": strategy, "device_mesh": mesh}


def shards_over_a_group(bench: InterfaceBench, kind: str) -> None:
    """Over half of the ranks: what is sharded and averaged stays among them. ``kind`` is group or mesh."""
    half = bench.size // 2
    mesh = init_device_mesh(bench.device.type, (2, half), mesh_dim_names=("outer", "inner"))
    inner = mesh["inner"]
    options: dict[str, Any] = (
        {"process_group": inner.get_group()} if kind == "group" else {"device_mesh": inner}
    )
    takes_the_step_of(bench, range(bench.rank // half * half, (bench.rank // half + 1) * half), **options)


def trains_in_replicas(bench: InterfaceBench, kind: str, strategy: ShardingStrategy) -> None:
    """In two replicas: all ranks train one model. ``kind`` is groups or mesh."""
    half = bench.size // 2
    mesh = init_device_mesh(bench.device.type, (2, half), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    options: dict[str, Any] = {"process_group": groups} if kind == "groups" else {"device_mesh": mesh}
    total = sum(p.numel() for p in Tower().parameters())
    policy = bench.names.ModuleWrapPolicy({Block})
    root = takes_the_step_of(
        bench, range(bench.size), auto_wrap_policy=policy, sharding_strategy=strategy, **options
    )
    local = sum(p.numel() for p in root.parameters())
    (sizes,) = _sum_over_ranks(bench, [local])
    bench.note("each replica holds the model once", 2 * total <= sizes <= 2 * (total + 16 * half))


def ignores(bench: InterfaceBench, kind: str) -> None:
    """Leave the head alone: named as a module, or by its parameters. Its gradient is the rank's own."""
    model, plain = Tower(), Tower()
    given: dict[str, dict[str, Any]] = {
        "ignored_modules": {"ignored_modules": [model.head]},
        "ignored_states of modules": {"ignored_states": [model.head]},
        "ignored_states of parameters": {"ignored_states": list(model.head.parameters())},
    }
    head = model.head
    before = list(head.parameters())
    root = wrap(bench, model, auto_wrap_policy=bench.names.ModuleWrapPolicy({nn.Linear}), **given[kind])
    bench.note("units", units_of(bench, root, plain))
    bench.note(IGNORED, all(p is q for p, q in zip(before, head.parameters(), strict=True)))
    root(rows(bench.rank).to(bench.device)).sum().backward()
    plain(rows(bench.rank)).sum().backward()
    own = {name: p.grad for name, p in plain.head.named_parameters() if p.grad is not None}
    got = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    bench.note("gradients of ignored parameters are the rank's own", same(got, own))


def keeps_on_the_host(bench: InterfaceBench) -> None:
    """Offload: shards and gradients are on the host between steps, and the step is right."""
    root = takes_the_step_of(bench, range(bench.size), cpu_offload=CPUOffload(offload_params=True))
    homes = {t.device.type for p in root.parameters() for t in (p, p.grad) if t is not None}
    bench.note("devices between steps", sorted(homes))
