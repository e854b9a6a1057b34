"""Consecutive shards are recognised without reading each element; a count over all elements must agree."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch

from shardproof.engine.contract import Shard
from shardproof.harness.laws.structure import are_consecutive


def _counts(shards: list[Shard], shape: tuple[int, ...]) -> torch.Tensor:
    """Count the different shards that hold each element."""
    places = set[tuple[int, ...]]()
    for shard in shards:
        numbers = torch.arange(math.prod(shape)).view(shape)
        places.add(tuple(shard.of(numbers).flatten().tolist()))
    return torch.bincount(torch.tensor([n for place in places for n in place]), minlength=math.prod(shape))


def _drawn(draw: random.Random, shape: tuple[int, ...]) -> Shard:
    if not shape or draw.random() < 0.4:
        size = math.prod(shape)
        start, end = sorted((draw.randint(0, size), draw.randint(0, size)))
        return Shard.flat(torch.zeros(end - start), start, shape)
    start, end = sorted((draw.randint(0, shape[0]), draw.randint(0, shape[0])))
    columns = draw.randint(1, shape[1]) if len(shape) > 1 else 0
    local = (end - start, columns, *shape[2:]) if columns else (end - start,)
    return Shard(tensor=torch.zeros(local), offsets=(start, *(0 for _ in shape[1:])), global_shape=shape)


def _chunks(draw: random.Random, shape: tuple[int, ...]) -> list[Shard]:
    """Cut a whole into flat pieces or rows, some of them empty, and repeat a few."""
    size = math.prod(shape) if not shape or draw.random() < 0.5 else shape[0]
    is_flat = size != (shape[0] if shape else 0)
    cuts = [0, *sorted(draw.choices(range(size + 1), k=2)), size]
    shards = [
        Shard.flat(torch.zeros(b - a), a, shape)
        if is_flat
        else Shard(
            tensor=torch.zeros(b - a, *shape[1:]), offsets=(a, *(0 for _ in shape[1:])), global_shape=shape
        )
        for a, b in pairwise(cuts)
    ]
    return shards + draw.choices(shards, k=2)


def test_shards_that_follow_each_other_hold_each_element_once() -> None:
    draw, found = random.Random(0), {True: 0, False: 0}
    for _ in range(2_000):
        shape = draw.choice([(), (6,), (4, 3), (3, 1, 2)])
        shards = _chunks(draw, shape) if draw.random() < 0.5 else [_drawn(draw, shape) for _ in range(3)]
        draw.shuffle(shards)
        if draw.random() < 0.3:
            shards.pop()
        is_consecutive = are_consecutive(shards)
        found[is_consecutive] += 1
        if is_consecutive:
            assert _counts(shards, shape).eq(1).all(), shards
    assert min(found.values()) > 300


@pytest.mark.parametrize("shape", [(), (6,), (4, 3), (3, 1, 2)])
def test_a_whole_tensor_and_its_halves_are_consecutive(shape: tuple[int, ...]) -> None:
    whole = Shard(tensor=torch.zeros(shape), offsets=(0,) * len(shape), global_shape=shape)
    assert are_consecutive([whole, whole])
    if shape:
        halves = [
            Shard(tensor=rows, offsets=(start, *(0 for _ in shape[1:])), global_shape=shape)
            for start, rows in zip((0, (shape[0] + 1) // 2), torch.zeros(shape).chunk(2), strict=True)
        ]
        assert are_consecutive(halves)
        assert not are_consecutive(halves[:1])
        assert not are_consecutive([whole, *halves])
