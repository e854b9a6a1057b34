"""How many collectives cross in forward and backward, by what stays gathered. Accumulation has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.tracing.ledger import Op, Phase
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    Seen,
    Watch,
    both_doors,
    count,
    hybrid_mesh,
    replicate_chain,
    run,
    shard_chain,
)

NUM_UNITS = 3
NUM_GROUPS = NUM_UNITS + 1
AG, RS, AR = Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE
RESHARD: tuple[bool | int | None, ...] = (True, False, 2, None)

# What is gathered again in backward, by reshard_after_forward: None keeps the root only.
REGATHERED: Mapping[bool | int | None, int] = {True: NUM_GROUPS, 2: NUM_GROUPS, None: NUM_UNITS, False: 0}


def _train(
    context: RankContext, door: str, reshard: bool | int | None, shape: tuple[int, ...], steps: int
) -> Seen:
    watch = Watch(context, NUM_UNITS)
    mesh = hybrid_mesh(*shape) if shape else None
    shard_chain(BY_NAME[door], watch.chain, mesh=mesh, reshard_after_forward=reshard)
    for step in range(steps):
        watch.train(step=step)
    return watch.seen()


def _nonzero(counts: Mapping[Op, int]) -> dict[Op, int]:
    return {op: number for op, number in counts.items() if number}


@both_doors
@pytest.mark.parametrize("shape", [(), (2, 2)], ids=["flat", "hybrid"])
@pytest.mark.parametrize("reshard", RESHARD)
def test_gathers_once_each_way_and_reduces_once(
    door: str, reshard: bool | int | None, shape: tuple[int, ...], tmp_path: Path
) -> None:
    for seen in run(tmp_path, 4, _train, door, reshard, shape, 2):
        for step in range(2):
            entries = [e for e in seen.entries if e.step == step]
            assert count(entries, Phase.FORWARD) == {AG: NUM_GROUPS}
            expected = {AG: REGATHERED[reshard], RS: NUM_GROUPS, AR: NUM_GROUPS if shape else 0}
            assert count(entries, Phase.BACKWARD) == _nonzero(expected)
        assert not seen.left_whole


@both_doors
def test_counts_are_the_same_over_gloo(door: str, tmp_path: Path) -> None:
    for seen in run(tmp_path, 2, _train, door, None, (), 1, kind=WorldKind.PROCESSES):
        assert count(seen.entries, Phase.FORWARD) == {AG: NUM_GROUPS}
        assert count(seen.entries, Phase.BACKWARD) == {AG: NUM_UNITS, RS: NUM_GROUPS}


def _reshard_by_hand(context: RankContext, door: str) -> Seen:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=False)
    output = watch.forward()
    assert len(watch.whole()) == NUM_GROUPS
    for module in (model, *watch.chain.units):
        module.reshard()
    assert not watch.whole()
    watch.backward(output)
    return watch.seen()


@both_doors
def test_what_is_resharded_by_hand_is_gathered_again(door: str, tmp_path: Path) -> None:
    for seen in run(tmp_path, 4, _reshard_by_hand, door):
        assert count(seen.entries, Phase.FORWARD) == {AG: NUM_GROUPS}
        assert count(seen.entries, Phase.BACKWARD) == {AG: NUM_GROUPS, RS: NUM_GROUPS}
        assert not seen.left_whole


def _set_later(
    context: RankContext, door: str, given: bool | None, later: bool | None, recurse: bool
) -> Seen:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=given)
    if later is not None:
        model.set_reshard_after_forward(later, recurse=recurse)
    watch.train()
    return watch.seen()


@both_doors
@pytest.mark.parametrize(
    ("given", "later", "recurse", "regathered"),
    [
        (None, None, True, NUM_UNITS),
        (False, True, True, NUM_GROUPS),
        (False, True, False, 1),
        (True, False, True, 0),
        (True, False, False, NUM_UNITS),
        (None, True, False, NUM_GROUPS),  # also turns the root rule off
    ],
)
def test_reshard_after_forward_can_be_set_later(
    door: str, given: bool | None, later: bool | None, recurse: bool, regathered: int, tmp_path: Path
) -> None:
    for seen in run(tmp_path, 4, _set_later, door, given, later, recurse):
        assert count(seen.entries, Phase.FORWARD) == {AG: NUM_GROUPS}
        assert count(seen.entries, Phase.BACKWARD) == _nonzero({AG: regathered, RS: NUM_GROUPS})


def _forward_twice(context: RankContext, door: str, reshard: bool | None) -> Seen:
    watch = Watch(context, NUM_UNITS)
    shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=reshard)
    for step in range(2):
        outputs = [watch.forward(step=step, microbatch=m) for m in range(2)]
        watch.backward(outputs[0] + outputs[1], step=step)
    return watch.seen()


@both_doors
@pytest.mark.parametrize("reshard", [True, False, None])
def test_two_forwards_then_one_backward(door: str, reshard: bool | None, tmp_path: Path) -> None:
    for seen in run(tmp_path, 4, _forward_twice, door, reshard):
        for step in range(2):
            entries = [e for e in seen.entries if e.step == step]
            forwards = [[e for e in entries if e.microbatch == m] for m in range(2)]
            assert count(forwards[0], Phase.FORWARD) == {AG: NUM_GROUPS}
            assert count(forwards[1], Phase.FORWARD) == _nonzero({AG: REGATHERED[reshard]})
            backward = count(entries, Phase.BACKWARD)
            assert backward.pop(RS) == NUM_GROUPS, "autograd hands over each gradient once, the sum of both"
            # Freed by the first of its two backwards (as torch does), a unit comes back for the second; not the
            # first unit and the root, whose inputs need no gradient.
            once, second = REGATHERED[reshard], NUM_UNITS - 1
            assert backward.pop(AG, 0) in {once, once + second}
            assert not backward
        assert not seen.left_whole


def _train_alone(context: RankContext, door: str, replicated: bool, reshard: bool | None) -> Seen:
    watch = Watch(context, NUM_UNITS)
    if replicated:
        replicate_chain(BY_NAME[door], watch.chain)
    else:
        shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=reshard)
    for step in range(2):
        watch.train(step=step)
    return watch.seen()


@both_doors
@pytest.mark.parametrize(
    ("replicated", "reshard"), [(False, True), (False, None), (False, False), (True, None)]
)
def test_one_rank_says_nothing(door: str, replicated: bool, reshard: bool | None, tmp_path: Path) -> None:
    (seen,) = run(tmp_path, 1, _train_alone, door, replicated, reshard)
    talk = [e for e in seen.entries if len(e.group) > 1]
    assert talk == []
    # A message to oneself is none: torch all-reduces replicas even where there is one.
    assert count(seen.entries) in ([{}, {AR: 2 * NUM_GROUPS}] if replicated else [{}])
    assert not seen.left_whole


@both_doors
@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3)], ids=str)
def test_an_axis_of_one_rank_needs_no_message(
    door: str, shape: tuple[int, int], reshard: bool | None, tmp_path: Path
) -> None:
    for seen in run(tmp_path, 3, _train, door, reshard, shape, 1):
        talk = [e for e in seen.entries if len(e.group) > 1]
        if shape == (3, 1):
            assert count(talk) == {AR: NUM_GROUPS}
        else:
            assert count(talk, Phase.FORWARD) == {AG: NUM_GROUPS}
            assert count(talk, Phase.BACKWARD) == {AG: REGATHERED[reshard], RS: NUM_GROUPS}
        assert not seen.left_whole


def _train_replicas(context: RankContext, door: str) -> Seen:
    watch = Watch(context, NUM_UNITS)
    replicate_chain(BY_NAME[door], watch.chain)
    for step in range(2):
        watch.train(step=step)
    return watch.seen()


@both_doors
def test_replicas_only_all_reduce(door: str, tmp_path: Path) -> None:
    for seen in run(tmp_path, 3, _train_replicas, door):
        for step in range(2):
            entries = [e for e in seen.entries if e.step == step]
            assert count(entries, Phase.FORWARD) == {}
            assert count(entries, Phase.BACKWARD) == {AR: NUM_GROUPS}
        assert not seen.left_whole
