"""Each rank holds the share of a parameter in the plan's layout: a part where it is sharded, else the whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from shardproof import (
    Cut,
    HoldsItsShare,
    Layout,
    MatchesOracle,
    Plan,
    Replicas,
    Ruling,
    Schedule,
    Shard,
    Training,
)
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.fixtures.tensor_parallel import STACK_16
from shardproof.harness.laws.structure import are_consecutive
from shardproof.harness.records.observation import Observation
from tests.laws.flat_pieces import flattened
from tests.simulated_engine import evidence_of, oracle_of, simulate

WORLD_SIZE = 4
PLANS = {
    "replicate": Plan(layout=Layout.REPLICATE),
    "shard": Plan(layout=Layout.SHARD),
    **{r.name.lower(): Plan(layout=Layout.HYBRID, replicas=r) for r in Replicas},
}
# The number of shares of each plan on four ranks, and the real layout of each simulated engine.
SHARES = {"replicate": 1, "shard": 4, "one": 4, "two": 2, "pairs": 2, "singles": 1}
HELD = {Layout.REPLICATE: 1, Layout.HYBRID: 2, Layout.SHARD: 4}


def _training(plan: Plan) -> Training:
    return Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=1))


def _ruling(plan: Plan, held: Layout, shown: Callable[[Observation], Observation] = lambda o: o) -> Ruling:
    ranks = tuple(shown(o) for o in simulate(_training(plan), WORLD_SIZE, layout=held))
    oracle = oracle_of(_training(Plan()), WORLD_SIZE)
    return HoldsItsShare().judge(evidence_of(_training(plan), WORLD_SIZE, ranks=ranks, oracle=oracle))


@pytest.mark.parametrize("held", HELD, ids=lambda x: f"held as {x.name}")
@pytest.mark.parametrize("asked", PLANS)
def test_holds_for_the_share_that_the_plan_means(asked: str, held: Layout) -> None:
    # A rank may hold less than its share of a sharded parameter, but must hold all of a whole one.
    is_right = HELD[held] == 1 if SHARES[asked] == 1 else HELD[held] >= SHARES[asked]
    record = _ruling(PLANS[asked], held).record
    assert record.held is is_right
    assert (f"1/{SHARES[asked]} of" in record.summary) or (record.held and "whole" in record.summary)


@pytest.mark.parametrize(
    ("cut", "is_right"), [(Cut.PARAMETERS, True), (Cut.EVENLY, False)], ids=lambda x: str(x)
)
def test_a_rank_without_state_is_right_where_state_lies_by_parameter(cut: Cut, is_right: bool) -> None:
    """The rank may own what is never updated; but of what is cut evenly, each rank has a part."""
    training = replace(_training(Plan()), optimizer=ADAMW)
    ranks = tuple(
        replace(o, cut=cut, optimizer_state={} if o.rank else o.optimizer_state)
        for o in simulate(training, WORLD_SIZE, layout=Layout.REPLICATE)
    )
    record = MatchesOracle().judge(evidence_of(training, WORLD_SIZE, ranks=ranks)).record
    assert record.held is is_right
    assert is_right or "rank 0 has all of them whole" in record.summary


def _flattened_together(observation: Observation, num_shares: int) -> Observation:
    """Let each rank hold its part of one long flat parameter, as engines that flatten a group do."""
    whole = observation.steps[0].parameters
    share = -(-sum(s.tensor.numel() for s in whole.values()) // num_shares)
    first = observation.rank % num_shares * share
    begin = 0
    mine = {}
    for name, shard in whole.items():
        size = shard.tensor.numel()
        start, stop = (min(max(end - begin, 0), size) for end in (first, first + share))
        mine[name] = Shard.flat(shard.tensor.flatten()[start:stop], start, shard.global_shape)
        begin += size
    return replace(observation, steps=(replace(observation.steps[0], parameters=mine),))


@pytest.mark.parametrize("held", [1, 2, 4], ids="held as {}".format)
@pytest.mark.parametrize("asked", PLANS)
def test_flat_pieces_hold_for_the_share_that_the_plan_means(asked: str, held: int) -> None:
    # One rank holds a whole parameter, and the other ranks hold none of it.
    shown = partial(_flattened_together, num_shares=held)
    record = _ruling(PLANS[asked], Layout.REPLICATE, shown).record
    assert record.held is (held == 1 if SHARES[asked] == 1 else held >= SHARES[asked])
    assert (f"1/{SHARES[asked]} of" in record.summary) or (record.held and "whole" in record.summary)


def _cut(observation: Observation, *, is_sharded: bool) -> Observation:
    """Cut rows over the two ranks of a tensor axis, and what each has over its two ranks of data."""
    data, tensor = divmod(observation.rank, 2)
    mine = {}
    for name, whole in observation.steps[0].parameters.items():
        begin = whole.tensor.shape[0] // 2 * tensor
        part = whole.tensor.chunk(2)[tensor]
        if is_sharded:
            begin, part = begin + part.shape[0] // 2 * data, part.chunk(2)[data]
        mine[name] = Shard(tensor=part, offsets=(begin, *whole.offsets[1:]), global_shape=whole.global_shape)
    return replace(observation, steps=(replace(observation.steps[0], parameters=mine),))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_rank_holds_its_share_of_what_a_tensor_axis_has_cut(is_sharded: bool) -> None:
    trained = replace(_training(PLANS["replicate"]), problem=STACK_16)
    observations = simulate(trained, WORLD_SIZE, layout=Layout.REPLICATE)
    ranks = tuple(_cut(observation, is_sharded=is_sharded) for observation in observations)
    asked = replace(trained, plan=Plan(layout=Layout.SHARD, tensor_parallel=2))
    record = (
        HoldsItsShare()
        .judge(evidence_of(asked, WORLD_SIZE, ranks=ranks, oracle=oracle_of(trained, WORLD_SIZE)))
        .record
    )
    assert record.held is is_sharded
    assert "1/2 of" in record.summary


def test_too_many_flat_elements_are_counted() -> None:
    summary = _ruling(PLANS["shard"], Layout.REPLICATE, flattened).record.summary
    # MLP_UNEVEN has 1776 elements in 8 parameters; each may need 3 more to be aligned.
    most = sum(-(-(n + 3) // 4) for n in (481, 37, 1073, 29, 145, 5, 5, 1))
    assert summary.startswith(
        f"step 0, rank 0: expected at most {most} elements, 1/4 of the 1776 of all flattened parameters, got 1776"
    )


def test_the_law_accepts_a_plan_without_a_layout() -> None:
    with pytest.raises(ValueError, match=r"expected a plan that names a layout, got Layout\.NATIVE"):
        _ruling(Plan(), Layout.SHARD)


# The rows of MLP_UNEVEN explain chunks of 13, 37, 29 and 5 in its units: one of 4 ranks may hold so many elements.
CHUNKED = 143 + 296 + 58 + 5
IN_UNITS = replace(PLANS["shard"], units=MLP_UNEVEN.units)


def _stretched(
    observation: Observation,
    *,
    share: int,
    cut: Cut = Cut.CHUNKS,
    of_rank: Callable[[int], int] = lambda rank: rank,
    num_lost: int = 0,
) -> Observation:
    """Let each rank hold ``share`` elements of one long flat parameter, and the last rank the rest, less some lost."""
    first = of_rank(observation.rank) * share
    begin, mine = 0, {}
    for name, shard in observation.steps[0].parameters.items():
        size = shard.tensor.numel()
        start, stop = (min(max(end - begin, 0), size) for end in (first, first + share - num_lost))
        mine[name] = Shard.flat(shard.tensor.flatten()[start:stop], start, shard.global_shape)
        begin += size
    return replace(observation, steps=(replace(observation.steps[0], parameters=mine),), cut=cut)


def test_shares_of_chunks_may_be_uneven_where_the_engine_declares_it() -> None:
    uneven = partial(_stretched, share=CHUNKED)
    record = _ruling(IN_UNITS, Layout.REPLICATE, uneven).record
    assert record.held
    assert (
        record.summary == "each element once in 4 shares of whole chunks, of 270 to 502 elements, on 4 ranks"
    )
    assert not _ruling(IN_UNITS, Layout.REPLICATE, partial(uneven, cut=Cut.EVENLY)).record.held


@pytest.mark.parametrize(
    ("stretched", "word"),
    [
        (partial(_stretched, share=CHUNKED + 1), "expected at most 502 elements, 1/4 of the 1776 of all"),
        (partial(_stretched, share=CHUNKED, of_rank=lambda rank: min(rank, 2)), "held twice"),
        (partial(_stretched, share=CHUNKED, of_rank=lambda rank: min(rank, 2)), "got the first"),
        (partial(_stretched, share=CHUNKED, num_lost=1), "held by no rank"),
        (partial(_flattened_together, num_shares=2), "expected at most 502 elements"),
        (flattened, "held twice"),
    ],
)
def test_chunks_are_no_excuse(stretched: Callable[[Observation], Observation], word: str) -> None:
    """Chunks excuse no duplicates, no missing elements, and no larger surplus than rows explain."""
    record = _ruling(IN_UNITS, Layout.REPLICATE, lambda o: replace(stretched(o), cut=Cut.CHUNKS)).record
    assert not record.held
    assert any(word in text for text in record.details)


# Consecutive shards.


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
