"""Exercises of clipping by the wrapper's own method: the norm that it tells, and the gradients that it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardproof import InterfaceBench
from suites.wrapper.claims import Claims
from suites.wrapper.specimens import Form, Wrapping, batch, copies, gradients, tower, train, wrapped

__all__ = [
    "clip",
    "clip_a_mixture",
    "clip_beside_ignored",
    "clip_hybrid",
    "clip_in_dtype",
    "clip_little",
    "clip_nothing",
    "clip_of_a_unit",
    "clip_where_few_have_any",
]

# Norms are computed in single precision, by roots and powers that may round differently.
_TOLERANCE = 1e-5


def clip(bench: InterfaceBench, strategy: ShardingStrategy, form: Form, norm_type: float) -> None:
    """Clip to a quarter; note the norm, and by how much a step moved the parameters."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), sharding_strategy=strategy, use_orig_params=form.use_orig_params)
    _clip_to_a_quarter(bench, root, claims, gradients(tower(), bench.size), norm_type)


def clip_hybrid(bench: InterfaceBench, norm_type: float) -> None:
    """Clip a model of which replicas have shards each."""
    root = Wrapping(strategy=ShardingStrategy.HYBRID_SHARD).wrap(bench, tower())
    _clip_to_a_quarter(bench, root, Claims(bench), gradients(tower(), bench.size), norm_type)


def clip_a_mixture(bench: InterfaceBench, norm_type: float) -> None:
    """Clip a model of which one unit is replicated and the rest are shards."""
    model = tower()
    model.middle = wrapped(bench, model.middle, units=("1",), sharding_strategy=ShardingStrategy.NO_SHARD)
    root = wrapped(bench, model, units=())
    _clip_to_a_quarter(bench, root, Claims(bench), gradients(tower(), bench.size), norm_type)


def clip_beside_ignored(bench: InterfaceBench, norm_type: float) -> None:
    """Clip a model of which the wrapper ignores the head, whose gradient ranks have made equal themselves."""
    model = tower()
    expected = gradients(tower(), bench.size)
    head = model.head
    root = wrapped(bench, model, ignored_states=[head])
    _clip_to_a_quarter(bench, root, Claims(bench), expected, norm_type, by_hand=head)


def _clip_to_a_quarter(
    bench: InterfaceBench,
    root: Any,
    claims: Claims,
    expected: dict[str, torch.Tensor],
    norm_type: float,
    by_hand: nn.Module | None = None,
) -> None:
    """Clip so that a step of one moves parameters by a quarter of the gradients."""
    optimizer = torch.optim.SGD(root.parameters(), lr=1.0)
    train(bench, root)
    if by_hand is not None:
        for name, parameter in by_hand.named_parameters():
            parameter.grad = expected[f"head.{name}"].clone()
    total = _norm(expected.values(), norm_type)
    told = root.clip_grad_norm_(float(total) / 4, norm_type)
    claims.near("the norm", told, total, tolerance=_TOLERANCE)
    optimizer.step()
    with bench.names.FullyShardedDataParallel.summon_full_params(root, writeback=False):
        after = copies(root.named_parameters())
    moved = {name: p.detach() - after[name] for name, p in tower().named_parameters()}
    claims.near("clipped gradients", moved, {k: g / 4 for k, g in expected.items()}, tolerance=_TOLERANCE)


def clip_little(bench: InterfaceBench) -> None:
    """Clip to far more than there is; note that nothing changed."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    train(bench, root)
    expected = gradients(tower(), bench.size)
    total = _norm(expected.values(), 2.0)
    told = root.clip_grad_norm_(1000 * float(total))
    claims.near("the norm", told, total, tolerance=_TOLERANCE)
    with bench.names.FullyShardedDataParallel.summon_full_params(root, with_grads=True, writeback=False):
        got = {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
    claims.same("gradients", got, expected)


def clip_nothing(bench: InterfaceBench) -> None:
    """Clip before there is any gradient."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    claims.same("the norm", root.clip_grad_norm_(1.0), torch.tensor(0.0))


def clip_where_few_have_any(bench: InterfaceBench) -> None:
    """Clip a model of a single number, of which all ranks but one have nothing."""
    claims = Claims(bench)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    root = wrapped(bench, model, units=())
    optimizer = torch.optim.SGD(root.parameters(), lr=1.0)
    root(torch.full((2, 1), 4.0)).sum().backward()  # two rows of four make eight
    told = root.clip_grad_norm_(2.0)
    claims.near("the norm", told, torch.tensor(8.0), tolerance=_TOLERANCE)
    optimizer.step()
    with bench.names.FullyShardedDataParallel.summon_full_params(root, writeback=False):
        after = copies(root.named_parameters())
    claims.near("the number afterwards", after, {"weight": torch.tensor([[1.0]])}, tolerance=_TOLERANCE)


def clip_in_dtype(bench: InterfaceBench, dtype: torch.dtype) -> None:
    """Clip gradients of another dtype; note the dtype of the norm, and its value."""
    claims = Claims(bench)
    root = wrapped(bench, tower(dtype))
    train(bench, root, dtype=dtype)
    expected = gradients(tower(dtype), bench.size)
    told = root.clip_grad_norm_(1.0)
    total = _norm([g.double() for g in expected.values()], 2.0).to(dtype)
    # Gradients of few bits were rounded where they were made, in another order on each side.
    tolerance = max(_TOLERANCE, 4 * torch.finfo(dtype).eps)
    claims.near("the norm", told, total, tolerance=tolerance)


def clip_of_a_unit(bench: InterfaceBench) -> None:
    """Note what becomes of clipping a unit alone."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    root(batch(bench.rank))
    claims.refuses("clipping a unit", lambda: root.middle.clip_grad_norm_(1.0), RuntimeError)


def _norm(tensors: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors]), norm_type)
    return total
