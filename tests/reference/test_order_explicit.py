"""Prefetch lists: what is issued ahead of whom, and that a wrong list costs a gather but neither truth nor memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.tracing.ledger import Phase
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    ROOT,
    Seen,
    Watch,
    assert_gradients,
    both_doors,
    plain_gradients,
    replicate_chain,
    run,
    shard_chain,
    story,
)

NUM_UNITS = 4
SIZE = 2
STEPS = range(3)
Lists = dict[int, Sequence[int]]  # whom each unit prefetches


def _train(context: RankContext, door: str, forward: Lists, backward: Lists, reshard: bool = True) -> Seen:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=reshard)
    _set_lists(watch, forward, backward)
    for step in STEPS:
        model.zero_grad()
        watch.train(step=step)
    assert_gradients(watch.chain, plain_gradients(SIZE, NUM_UNITS))
    return watch.seen()


def _set_lists(watch: Watch, forward: Lists, backward: Lists) -> None:
    units = watch.chain.units
    for index, targets in forward.items():
        units[index].set_modules_to_forward_prefetch([units[t] for t in targets])  # type: ignore[operator]
    for index, targets in backward.items():
        units[index].set_modules_to_backward_prefetch([units[t] for t in targets])  # type: ignore[operator]


def _next(ahead: int) -> Lists:
    return {i: range(i + 1, min(i + 1 + ahead, NUM_UNITS)) for i in range(NUM_UNITS)}


def _previous(ahead: int) -> Lists:
    return {i: range(i - 1, max(i - 1 - ahead, -1), -1) for i in range(NUM_UNITS)}


@both_doors
@pytest.mark.parametrize("ahead", [1, 2])
def test_forward_issues_the_list_before_it_computes(door: str, ahead: int, tmp_path: Path) -> None:
    for seen in run(tmp_path, SIZE, _train, door, _next(ahead), {}):
        for step in STEPS:
            words = story(seen, SIZE, Phase.FORWARD, step)
            assert [w for w in words if w[0] == "G"] == [f"G{i}" for i in (ROOT, *range(NUM_UNITS))]
            for i, targets in _next(ahead).items():
                assert all(words.index(f"G{t}") < words.index(f"F{i}") for t in targets), words
        assert not seen.left_whole


@both_doors
@pytest.mark.parametrize("ahead", [1, 2])
def test_backward_issues_the_list_before_it_computes(door: str, ahead: int, tmp_path: Path) -> None:
    for seen in run(tmp_path, SIZE, _train, door, {}, _previous(ahead)):
        for step in STEPS:
            words = story(seen, SIZE, Phase.BACKWARD, step)
            expected = [f"G{i}" for i in (ROOT, *reversed(range(NUM_UNITS)))]
            assert [w for w in words if w[0] == "G"] == expected
            for i, targets in _previous(ahead).items():
                assert all(words.index(f"G{t}") < words.index(f"B{i}") for t in targets), words
        assert not seen.left_whole


@both_doors
def test_a_list_replaces_the_default_and_an_empty_one_brings_it_back(door: str, tmp_path: Path) -> None:
    # Unit 3 prefetches unit 1 and not its neighbour; later nothing of its own.
    for seen in run(tmp_path, SIZE, _train, door, {}, {3: (1,)}):
        for step in STEPS:
            words = story(seen, SIZE, Phase.BACKWARD, step)
            assert words.index("G1") < words.index("B3") < words.index("G2")
    for seen in run(tmp_path / "empty", SIZE, _train, door, {}, {3: ()}):
        for step in STEPS:
            words = story(seen, SIZE, Phase.BACKWARD, step)
            assert words.index("G2") < words.index("B3")


WRONG: dict[str, tuple[Lists, Lists]] = {
    "backward to the next": ({}, {i: (i + 1,) for i in range(NUM_UNITS - 1)}),
    "backward to the last": ({}, {0: (NUM_UNITS - 1,)}),
    "backward to all": ({}, {i: range(NUM_UNITS) for i in range(NUM_UNITS)}),
    "backward to itself": ({}, {i: (i,) for i in range(NUM_UNITS)}),
    "forward to the previous": ({i: (i - 1,) for i in range(1, NUM_UNITS)}, {}),
    "forward to the first": ({NUM_UNITS - 1: (0,)}, {}),
    "forward to all": ({i: range(NUM_UNITS) for i in range(NUM_UNITS)}, {}),
}


@both_doors
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_list_changes_no_gradient_and_leaves_nothing_whole(
    door: str, wrong: str, reshard: bool, tmp_path: Path
) -> None:
    for seen in run(tmp_path, SIZE, _train, door, *WRONG[wrong], reshard):
        assert not seen.left_whole
        for step in STEPS:
            reductions = Counter(w for w in story(seen, SIZE, Phase.BACKWARD, step) if w[0] == "R")
            assert reductions == Counter(f"R{i}" for i in (ROOT, *range(NUM_UNITS)))


def _prefetch_replicas(context: RankContext, door: str) -> Seen:
    watch = Watch(context, NUM_UNITS)
    model = replicate_chain(BY_NAME[door], watch.chain)
    _set_lists(watch, _next(2), _previous(2))
    for step in STEPS:
        model.zero_grad()
        watch.train(step=step)
    assert_gradients(watch.chain, plain_gradients(SIZE, NUM_UNITS))
    return watch.seen()


@both_doors
def test_lists_mean_no_message_for_replicas(door: str, tmp_path: Path) -> None:
    for seen in run(tmp_path, SIZE, _prefetch_replicas, door):
        assert not seen.left_whole
        for step in STEPS:
            assert not [w for w in story(seen, 1, Phase.FORWARD, step) if w[0] == "G"]
            reductions = [w for w in story(seen, 1, Phase.BACKWARD, step) if w[0] == "A"]
            assert sorted(reductions) == sorted(f"A{i}" for i in (ROOT, *range(NUM_UNITS)))
