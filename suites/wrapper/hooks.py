"""Exercises of communication hooks: what they are given, what they may change, and who may register one."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from shardproof import InterfaceBench, Op
from suites.wrapper.claims import Claims
from suites.wrapper.specimens import UNITS, gradients, summoned, tower, train, trained_alone, wrapped

__all__ = [
    "compress",
    "hook_by_default",
    "hook_replicas",
    "hook_shards",
    "refuse_hooks",
]

_LR = 0.25
# Gradients of what each unit owns itself, by the beginnings of names.
_OWNED = (("stem", "head"), ("middle.0",), ("middle.1",))


class _Diary:
    """The state of a hook: what it was called with."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.sizes: list[int] = []
        self.forms: list[tuple[int, ...]] = []  # dims of the gradient, and where there is one of the output

    def write(self, gradient: torch.Tensor, *output: torch.Tensor) -> None:
        """Remember one call."""
        self.sums.append(float(gradient.sum()))
        self.sizes.append(gradient.numel())
        self.forms.append((gradient.dim(), *(o.dim() for o in output)))


def refuse_hooks(bench: InterfaceBench) -> None:
    """Note what becomes of no hook, of a second one, of one for a unit and of one for replicas of shards."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    root.check_is_root()
    claims.refuses("what cannot be called", lambda: root.register_comm_hook(None, "no hook"), ValueError)
    unit = root.middle
    claims.refuses("a hook of a unit", lambda: unit.register_comm_hook(None, _ignore), AssertionError)
    root.register_comm_hook(None, _ignore)
    claims.refuses("a second hook", lambda: root.register_comm_hook(None, _ignore), AssertionError)
    mesh = init_device_mesh(bench.device.type, (1, bench.size), mesh_dim_names=("replicate", "shard"))
    hybrid = wrapped(bench, tower(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    claims.refuses("a hook of replicas", lambda: hybrid.register_comm_hook(None, _ignore), AssertionError)


def hook_shards(bench: InterfaceBench) -> None:
    """Sum by hand in a hook of shards; note what it was given, and what training made of it."""
    claims, diary = Claims(bench), _Diary()

    def sum_by_hand(state: _Diary, gradient: torch.Tensor, output: torch.Tensor) -> None:
        state.write(gradient, output)
        claims.same("a share of the gradient", output.numel() * bench.size, gradient.numel())
        total = gradient.clone()
        distributed.all_reduce(total)
        output.copy_(total.chunk(bench.size)[bench.rank] / bench.size)

    root = wrapped(bench, tower())
    root.register_comm_hook(diary, sum_by_hand)
    _train_with(bench, root, claims, diary, form=(1, 1))


def hook_replicas(bench: InterfaceBench) -> None:
    """Sum by hand in a hook of replicas; note what it was given, and what training made of it."""
    claims, diary = Claims(bench), _Diary()

    def sum_by_hand(state: _Diary, gradient: torch.Tensor) -> None:
        state.write(gradient)
        distributed.all_reduce(gradient)
        gradient.div_(bench.size)

    root = wrapped(bench, tower(), sharding_strategy=ShardingStrategy.NO_SHARD)
    root.register_comm_hook(diary, sum_by_hand)
    _train_with(bench, root, claims, diary, form=(1,))


def _train_with(
    bench: InterfaceBench, root: Any, claims: Claims, diary: _Diary, *, form: tuple[int, ...]
) -> None:
    optimizer = torch.optim.SGD(root.parameters(), lr=_LR)
    with root.no_sync():
        train(bench, root, step=1)
    claims.same("calls while gradients accumulate", len(diary.sums), 0)
    optimizer.zero_grad()
    train(bench, root)
    own = _own_gradients(bench)
    claims.same("sums of what it was given", sorted(diary.sums), sorted(own.values()))
    claims.same("its form", diary.forms, [form] * (1 + len(UNITS)))
    optimizer.step()
    claims.same("parameters afterwards", summoned(bench, root), trained_alone(bench.size, lr=_LR))


def _own_gradients(bench: InterfaceBench) -> dict[tuple[str, ...], float]:
    """Sum what this rank's rows alone give each unit."""
    alone = tower()
    train(bench, alone)
    named = [(name, float(p.grad.sum())) for name, p in alone.named_parameters() if p.grad is not None]
    return {owned: sum(value for name, value in named if name.startswith(owned)) for owned in _OWNED}


def hook_by_default(bench: InterfaceBench, strategy: ShardingStrategy) -> None:
    """Register the hook that does what is done without one, and note what training made of it."""
    names = bench.names
    root = wrapped(bench, tower(), sharding_strategy=strategy)
    is_whole = strategy is ShardingStrategy.NO_SHARD
    hook = names.allreduce_hook if is_whole else names.reduce_scatter_hook
    root.register_comm_hook(names.DefaultState(distributed.group.WORLD), hook)
    optimizer = torch.optim.SGD(root.parameters(), lr=_LR)
    train(bench, root)
    optimizer.step()
    got = summoned(bench, root)
    Claims(bench).same("parameters afterwards", got, trained_alone(bench.size, lr=_LR))


def compress(bench: InterfaceBench, dtype: torch.dtype, strategy: ShardingStrategy) -> None:
    """Register a hook that communicates in fewer bits; note in how many, and how far off the gradients are."""
    claims, names = Claims(bench), bench.names
    hook = names.bf16_compress_hook if dtype is torch.bfloat16 else names.fp16_compress_hook
    root = wrapped(bench, tower(), sharding_strategy=strategy)
    root.register_comm_hook(names.LowPrecisionState(distributed.group.WORLD), hook)
    # Steps of one: what the parameters lost is the gradient. And powers of two: their own rounding is far below.
    optimizer = torch.optim.SGD(root.parameters(), lr=1.0)
    already = len(bench.ledger())
    train(bench, root)
    crossed = {e.dtype for e in bench.ledger()[already:] if e.op in {Op.ALL_REDUCE, Op.REDUCE_SCATTER}}
    claims.same("what crossed", crossed, {str(dtype).removeprefix("torch.")})
    kept = {p.grad.dtype for p in root.parameters() if p.grad is not None}
    claims.same("gradients that are kept", kept - {torch.float32}, set())
    optimizer.step()
    before, after = dict(tower().named_parameters()), summoned(bench, root)
    got = {name: before[name].detach() - value for name, value in after.items()}
    # Each rank's share is rounded once, and each of the sums of ranks once more: half an eps of the largest each.
    claims.near(
        "gradients",
        got,
        gradients(tower(), bench.size),
        tolerance=torch.finfo(dtype).eps * (1 + bench.size),
    )


def _ignore(*_: object) -> None:
    """Do nothing, as a hook."""
