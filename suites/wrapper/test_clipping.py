"""Clipping by the wrapper's own method: the norm of the whole gradient on every rank, and the gradients afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL
from shardproof.suites.params import param, parametrize
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import batch, gradients, shown_gradients
from shardproof.suites.tower import tower
from shardproof.suites.wrapper.wrapping import EACH_FORM, Form, Wrapping, strategies

pytestmark = pytest.mark.api("clip_grad_norm_")
CLIPPED = ("the norm", "clipped gradients")
# Norms are computed in single precision, by roots and powers that may round differently.
_TOLERANCE = 1e-5
kills = pytest.mark.kills


def _norms(*, first: tuple[str, ...], second: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrize a test by orders of norms, the first two with the mutants that it must kill there."""
    orders = ((1.0, first), (2.0, second), (math.inf, ("SumsTheLargest",)))
    params = [param(order, id=f"norm_{order:g}", kills=mutants) for order, mutants in orders]
    return parametrize("norm_type", *params)


each_norm = _norms(first=("SumsNormsOfReplicas",), second=("SumsNormsOfReplicas",))


@pytest.mark.worlds(SEVERAL)
@EACH_FORM
@_norms(first=("ClipsShardsByTheirOwnNorm",), second=("ClipsShardsByTheirOwnNorm", "ClipsAndTellsNothing"))
@expects(*CLIPPED)
def test_clips_shards_by_the_norm_of_the_whole(bench: Bench, norm_type: float, form: Form) -> None:
    _clip_to_a_quarter(bench, bench.wrapped_by(Wrapping(form=form), tower()), norm_type)


@pytest.mark.worlds(SEVERAL)
@each_norm
@expects(*CLIPPED)
def test_clips_a_mixture_of_shards_and_replicas(bench: Bench, norm_type: float) -> None:
    """One unit is replicated, and the rest are shards."""
    model = tower()
    model.middle = bench.wrapped(model.middle, units=("1",), sharding_strategy=ShardingStrategy.NO_SHARD)
    _clip_to_a_quarter(bench, bench.wrapped(model, units=()), norm_type)


@pytest.mark.worlds(SEVERAL)
@each_norm
@expects(*CLIPPED)
def test_counts_what_it_ignores_once(bench: Bench, norm_type: float) -> None:
    """The wrapper ignores the head, whose gradients the ranks average themselves."""
    model = tower().to(bench.device)
    head = model.head
    _clip_to_a_quarter(bench, bench.wrapped(model, ignored_states=[head]), norm_type, by_hand=head)


# Any: engines have no common base class.
def _clip_to_a_quarter(bench: Bench, root: Any, norm_type: float, by_hand: nn.Module | None = None) -> None:
    """Clip to a quarter of the norm, and claim that a step of one moves parameters by a quarter of the gradients."""
    expected = gradients(tower(), bench.ranks)
    optimizer = torch.optim.SGD(root.parameters(), lr=1.0)
    bench.train(root)
    if by_hand is not None:
        for name, parameter in by_hand.named_parameters():
            parameter.grad = expected[f"head.{name}"].clone().to(parameter.device)
    total = _norm(expected.values(), norm_type)
    bench.near("the norm", root.clip_grad_norm_(float(total) / 4, norm_type), total, tolerance=_TOLERANCE)
    optimizer.step()
    after = bench.summoned(root)
    moved = {name: p.detach() - after[name] for name, p in tower().named_parameters()}
    quarters = {name: gradient / 4 for name, gradient in expected.items()}
    bench.near("clipped gradients", moved, quarters, tolerance=_TOLERANCE)


@pytest.mark.kills("ScalesLittleUp")
@expects("the norm", "gradients")
def test_leaves_little_gradients_alone(bench: Bench) -> None:
    root = bench.wrapped(tower())
    bench.train(root)
    expected = gradients(tower(), bench.ranks)
    total = _norm(expected.values(), 2.0)
    bench.near("the norm", root.clip_grad_norm_(1000 * float(total)), total, tolerance=_TOLERANCE)
    with bench.api.summon_full_params(root, with_grads=True, writeback=False):
        got = shown_gradients(root)
    bench.same("gradients", got, expected)


@pytest.mark.kills("ClipsAndTellsNothing")
@expects("the norm")
def test_returns_a_norm_of_nothing(bench: Bench) -> None:
    bench.same("the norm", bench.wrapped(tower()).clip_grad_norm_(1.0), torch.tensor(0.0))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ClipsShardsByTheirOwnNorm")
@expects("the norm", "the number afterwards")
def test_returns_the_norm_to_ranks_that_have_nothing(bench: Bench) -> None:
    """In a model of a single number, all ranks but one have nothing."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    root = bench.wrapped(model, units=())
    optimizer = torch.optim.SGD(root.parameters(), lr=1.0)
    root(torch.full((2, 1), 4.0)).sum().backward()  # two rows of four make eight
    bench.near("the norm", root.clip_grad_norm_(2.0), torch.tensor(8.0), tolerance=_TOLERANCE)
    optimizer.step()
    after, expected = bench.summoned(root), {"weight": torch.tensor([[1.0]])}
    bench.near("the number afterwards", after, expected, tolerance=_TOLERANCE)


@parametrize(
    "dtype",
    param(torch.float64, kills="ClipsShardsByTheirOwnNorm"),
    param(torch.bfloat16, kills="TellsNormsInSinglePrecision"),
)
@expects("the norm")
def test_returns_the_norm_in_the_dtype_of_gradients(bench: Bench, dtype: torch.dtype) -> None:
    root = bench.wrapped(tower(dtype))
    bench.train(root, dtype=dtype)
    expected = gradients(tower(dtype), bench.ranks)
    total = _norm([g.double() for g in expected.values()], 2.0).to(dtype)
    # Low-precision gradients were rounded where they were computed, in another order on each side.
    tolerance = max(_TOLERANCE, 4 * torch.finfo(dtype).eps)
    bench.near("the norm", root.clip_grad_norm_(1.0), total, tolerance=tolerance)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ClipsNothingWhileAccumulating")
@EACH_FORM
@strategies(ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
@expects("the norm while gradients accumulate")
def test_clips_what_accumulates_or_refuses(bench: Bench, strategy: ShardingStrategy, form: Form) -> None:
    """The norm is that of all ranks' gradients together; of replicas each rank clips its own, as torch does."""
    root = bench.wrapped_by(Wrapping(strategy=strategy, form=form), tower())
    with root.no_sync():
        bench.train(root)
    ranks = bench.ranks if strategy is ShardingStrategy.FULL_SHARD else [bench.rank]
    held = [g * bench.size for rank in ranks for g in gradients(tower(), [rank]).values()]
    total = _norm(held, 2.0)
    try:
        norm = root.clip_grad_norm_(1.0)
    except RuntimeError:  # refused
        norm = total
    bench.near("the norm while gradients accumulate", norm, total, tolerance=_TOLERANCE)


@pytest.mark.kills("ClipsUnitsAlone")
@expects("clipping a unit")
def test_refuses_to_clip_a_unit(bench: Bench) -> None:
    root = bench.wrapped(tower())
    root(batch(bench.rank))
    bench.refuses("clipping a unit", lambda: root.middle.clip_grad_norm_(1.0), RuntimeError)


def _norm(tensors: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors]), norm_type)
    return total
