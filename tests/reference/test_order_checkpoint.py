"""Recomputing activations: who is gathered for it, and that a recomputed forward starts nothing of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_module
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from harness.tracing.ledger import Phase
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    DOORS,
    ROOT,
    Chain,
    Seen,
    Watch,
    assert_gradients,
    both_doors,
    inputs_of,
    plain_gradients,
    run,
    shard_chain,
    story,
)

NUM_UNITS = 4
SIZE = 2
STEPS = range(3)


class Recompute(Enum):
    """Where the recomputation sits, seen from the sharded unit."""

    OUTSIDE = "torch.utils.checkpoint around the sharded unit"
    OUTSIDE_REENTRANT = "the same with use_reentrant=True"
    INSIDE = "torch.utils.checkpoint inside the sharded unit"
    INSIDE_REENTRANT = "inside, with use_reentrant=True"
    COMPOSABLE = "module hooks on the unit, set before sharding"


class Ahead(Enum):
    """Who prefetches."""

    DEFAULT = "nobody by list"
    FORWARD = "each unit the next in forward"
    BACKWARD = "each unit the previous in backward"


class CheckpointedChain(Chain):
    """A chain that runs each unit under a checkpoint."""

    reentrant = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run all units, keeping inputs only."""
        for unit in self.units:
            inputs = checkpoint(unit, inputs, use_reentrant=self.reentrant)
        return inputs * self.scale


class Reentrant(CheckpointedChain):
    """The same by nested backwards."""

    reentrant = True


def _checkpoint_inside(unit: nn.Module, reentrant: bool) -> None:
    plain = unit.forward

    def forward(inputs: torch.Tensor) -> Any:
        return checkpoint(plain, inputs, use_reentrant=reentrant)

    unit.forward = forward


def _watched(context: RankContext, door: str, where: Recompute, reshard: bool | None) -> Watch:
    watch = Watch(context, NUM_UNITS)
    match where:
        case Recompute.OUTSIDE:
            watch.chain.__class__ = CheckpointedChain
        case Recompute.OUTSIDE_REENTRANT:
            watch.chain.__class__ = Reentrant
        case Recompute.COMPOSABLE:
            for unit in watch.chain.units:
                checkpoint_module(unit)
        case _:
            for unit in watch.chain.units:
                _checkpoint_inside(unit, where is Recompute.INSIDE_REENTRANT)
    shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=reshard)
    return watch


def _train(
    context: RankContext, door: str, where: Recompute, ahead: Ahead, reshard: bool | None
) -> list[list[str]]:
    watch = _watched(context, door, where, reshard)
    units: list[Any] = list(watch.chain.units)
    if ahead is Ahead.FORWARD:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    if ahead is Ahead.BACKWARD:
        for previous, unit in pairwise(units):
            unit.set_modules_to_backward_prefetch([previous])
    for step in STEPS:
        watch.chain.zero_grad()
        # Reentrant checkpoints need an input that requires a gradient.
        output = watch.forward(inputs_of(context.rank).requires_grad_(), step=step)
        watch.backward(output, step=step)
        assert not watch.whole(), f"left whole: {watch.whole()}"
    assert_gradients(watch.chain, plain_gradients(SIZE, NUM_UNITS))
    seen: Seen = watch.seen()
    return [story(seen, SIZE, Phase.BACKWARD, step) for step in STEPS]


# pytorch/pytorch#169349's neighbour, seen in NeMo Automodel too: a forward recomputed by a nested backward is taken
# for a forward of the training, and prefetches a unit whose backward is over.
TORCH_GATHERS_TWICE = (Recompute.OUTSIDE_REENTRANT, Ahead.FORWARD)


def _cases() -> Iterator[Any]:
    for where in Recompute:
        for ahead in Ahead:
            for door in DOORS:
                is_torch = door == "torch"
                if not (is_torch and (where, ahead) == TORCH_GATHERS_TWICE):
                    yield pytest.param(door, where, ahead, id=f"{where.name}-{ahead.name}-{door}".lower())


@pytest.mark.parametrize(("door", "where", "ahead"), list(_cases()))
def test_recomputation_gathers_each_unit_once(
    door: str, where: Recompute, ahead: Ahead, tmp_path: Path
) -> None:
    for stories in run(tmp_path, SIZE, _train, door, where, ahead, True):
        for words in stories:
            counts = Counter(w for w in words if w[0] in "GR")
            expected = Counter(f"{letter}{i}" for letter in "GR" for i in (ROOT, *range(NUM_UNITS)))
            assert counts == expected, words
            assert Counter(w for w in words if w[0] == "F") == Counter(f"F{i}" for i in range(NUM_UNITS))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="measured with torch 2.13; look again")
def test_torch_gathers_twice_where_a_recomputed_forward_prefetches(tmp_path: Path) -> None:
    for stories in run(tmp_path, SIZE, _train, "torch", *TORCH_GATHERS_TWICE, True):
        for words in stories:
            gathers = Counter(w for w in words if w[0] == "G")
            assert gathers == {"G-1": 1, "G0": 1, **{f"G{i}": 2 for i in range(1, NUM_UNITS)}}


@both_doors
@pytest.mark.parametrize("where", Recompute, ids=lambda where: where.name.lower())
def test_recomputation_gathers_nothing_that_was_kept(door: str, where: Recompute, tmp_path: Path) -> None:
    for stories in run(tmp_path, SIZE, _train, door, where, Ahead.DEFAULT, False):
        for words in stories:
            assert not [w for w in words if w[0] == "G"], words


def _wrap(context: RankContext, door: str) -> list[list[str]]:
    watch = Watch(context, NUM_UNITS)
    chain = watch.chain
    chain.units = nn.ModuleList(checkpoint_wrapper(unit) for unit in chain.units)
    for wrapped in chain.units:
        assert isinstance(wrapped, CheckpointWrapper)
        BY_NAME[door].fully_shard(wrapped, reshard_after_forward=True)
    BY_NAME[door].fully_shard(chain, reshard_after_forward=True)
    left: list[list[str]] = []
    for step in STEPS:
        watch.chain.zero_grad()
        watch.mark = lambda kind, index: None  # type: ignore[method-assign]  # units are one level deeper here
        watch.backward(watch.forward(step=step), step=step)
        left.append([name for name, param in chain.named_parameters() if type(param) is nn.Parameter])
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in _gradients(chain).items()}
    expected = plain_gradients(SIZE, NUM_UNITS)
    assert sorted(gradients) == sorted(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])
    return left


def _gradients(chain: Chain) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in chain.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]  # a DTensor


@both_doors
def test_a_wrapper_may_be_sharded_with_what_it_wraps(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, SIZE, _wrap, door) == [[[]] * len(STEPS)] * SIZE
