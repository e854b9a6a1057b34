"""In which order an engine gathers, computes, reduces and frees when nobody tells it to; and what it never repeats.

The laws leave room for an engine that gathers further ahead than another: they say what must have been issued by
when, and who may be whole while a unit computes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.tracing.ledger import Op, Phase
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    ROOT,
    Seen,
    Unit,
    Watch,
    assert_gradients,
    both_doors,
    inputs_of,
    is_whole,
    plain_gradients,
    run,
    shard_chain,
    story,
)

NUM_UNITS = 4
SIZE = 2
STEPS = range(3)
RESHARD: tuple[bool | None, ...] = (True, False, None)


def _train(context: RankContext, door: str, reshard: bool | None) -> Seen:
    watch = Watch(context, NUM_UNITS)
    shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=reshard)
    for step in STEPS:
        watch.train(step=step)
    return watch.seen()


def _gathers(words: list[str]) -> list[str]:
    return [word for word in words if word[0] == "G"]


@both_doors
@pytest.mark.parametrize("reshard", RESHARD)
def test_forward_gathers_in_order_and_in_time(door: str, reshard: bool | None, tmp_path: Path) -> None:
    for seen in run(tmp_path, SIZE, _train, door, reshard):
        for step in STEPS:
            words = story(seen, SIZE, Phase.FORWARD, step)
            assert _gathers(words) == [f"G{i}" for i in (ROOT, *range(NUM_UNITS))]
            assert [w for w in words if w[0] == "F"] == [f"F{i}" for i in range(NUM_UNITS)]
            for i in range(NUM_UNITS):
                assert words.index(f"G{i}") < words.index(f"F{i}")
                # Memory: no more than two units ahead of compute.
                assert i < 3 or words.index(f"G{i}") > words.index(f"F{i - 3}")


@both_doors
@pytest.mark.parametrize("reshard", RESHARD)
def test_only_the_computing_unit_is_whole_where_units_are_freed(
    door: str, reshard: bool | None, tmp_path: Path
) -> None:
    for seen in run(tmp_path, SIZE, _train, door, reshard):
        for mark in seen.marks:
            i = mark.index
            if reshard is not False:
                assert mark.whole == {ROOT, i}, mark
            elif mark.kind == "F":
                assert mark.whole == {ROOT, *range(i + 1)}, mark
            else:
                assert mark.whole >= {ROOT, i}, mark
        assert not seen.left_whole


@both_doors
@pytest.mark.parametrize("reshard", [True, None])
def test_backward_gathers_one_ahead_of_reductions(door: str, reshard: bool | None, tmp_path: Path) -> None:
    for seen in run(tmp_path, SIZE, _train, door, reshard):
        for step in STEPS:
            words = story(seen, SIZE, Phase.BACKWARD, step)
            root = [f"G{ROOT}"] if reshard else []
            assert _gathers(words) == [*root, *(f"G{i}" for i in reversed(range(NUM_UNITS)))]
            for i in range(NUM_UNITS):
                assert words.index(f"G{i}") < words.index(f"B{i}") < words.index(f"R{i}")
                if i > 0:
                    assert words.index(f"G{i - 1}") < words.index(f"B{i}")


@both_doors
@pytest.mark.parametrize("reshard", RESHARD)
def test_reductions_come_in_the_order_of_backward(door: str, reshard: bool | None, tmp_path: Path) -> None:
    for seen in run(tmp_path, SIZE, _train, door, reshard):
        for step in STEPS:
            words = story(seen, SIZE, Phase.BACKWARD, step)
            reductions = [w for w in words if w[0] == "R"]
            assert Counter(reductions) == Counter(f"R{i}" for i in (ROOT, *range(NUM_UNITS)))
            # The root may be reduced as soon as its gradients are there, which is first, or at the end (as by torch).
            of_units = [w for w in reductions if w != f"R{ROOT}"]
            assert of_units == [f"R{i}" for i in reversed(range(NUM_UNITS))]
            # A reduction starts while backward goes on, not at its end.
            assert words.index(f"R{NUM_UNITS - 1}") < words.index(f"B{NUM_UNITS - 3}")


@both_doors
def test_the_order_is_the_same_over_gloo(door: str, tmp_path: Path) -> None:
    threads = run(tmp_path / "threads", SIZE, _train, door, True)
    processes = run(tmp_path / "processes", SIZE, _train, door, True, kind=WorldKind.PROCESSES)
    for step in STEPS:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            stories = {tuple(story(seen, SIZE, phase, step)) for seen in (*threads, *processes)}
            assert len(stories) == 1


def test_the_reference_gathers_one_ahead_in_forward(tmp_path: Path) -> None:
    # Once it has seen an order; torch leaves this to explicit lists.
    for seen in run(tmp_path, SIZE, _train, "reference", True):
        for step in STEPS[1:]:
            words = story(seen, SIZE, Phase.FORWARD, step)
            for i in range(NUM_UNITS - 1):
                assert words.index(f"G{i + 1}") < words.index(f"F{i}")


def _freeze(context: RankContext, door: str, frozen: tuple[int, ...], reshard: bool) -> Seen:
    watch = Watch(context, NUM_UNITS)
    for index in frozen:
        watch.chain.units[index].requires_grad_(False)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=reshard)
    for step in STEPS:
        model.zero_grad()
        watch.train(step=step)
    kept = {name: g for name, g in plain_gradients(SIZE, NUM_UNITS).items() if not _is_of(name, frozen)}
    assert_gradients(watch.chain, kept)
    return watch.seen()


def _is_of(name: str, units: tuple[int, ...]) -> bool:
    return any(name.startswith(f"units.{index}.") for index in units)


@both_doors
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", [(0,), (1,), (3,), (0, 1), (1, 2)], ids=str)
def test_frozen_units_are_freed_and_not_reduced(
    door: str, frozen: tuple[int, ...], reshard: bool, tmp_path: Path
) -> None:
    for seen in run(tmp_path, SIZE, _freeze, door, frozen, reshard):
        assert not seen.left_whole
        for step in STEPS:
            words = story(seen, SIZE, Phase.BACKWARD, step)
            reduced = {w for w in words if w[0] == "R"}
            assert reduced == {f"R{i}" for i in (ROOT, *range(NUM_UNITS)) if i not in frozen}
            assert max(Counter(_gathers(words)).values(), default=1) == 1
        # A frozen unit is freed as soon as its own backward is over, not with the others at the end.
        if reshard:
            assert all(mark.whole <= {ROOT, mark.index} for mark in seen.marks if mark.kind == "B")


class Fork(nn.Module):
    """A trunk and two heads, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = Unit(0), Unit(1), Unit(2)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what both heads say."""
        hidden = self.trunk(inputs)
        return self.left(hidden), self.right(hidden)


PARTS = ("trunk", "left", "right")


def _shard_fork(door: str) -> Fork:
    model = Fork()
    for part in PARTS:
        BY_NAME[door].fully_shard(getattr(model, part), reshard_after_forward=True)
    BY_NAME[door].fully_shard(model, reshard_after_forward=True)
    return model


def _left_whole(model: Fork) -> list[str]:
    return [part for part in PARTS if is_whole(getattr(model, part))]


def _use_one_head(context: RankContext, door: str, head: int) -> list[list[str]]:
    model, left = _shard_fork(door), []
    for _ in STEPS:
        model(inputs_of(context.rank))[head].sum().backward()
        left.append(_left_whole(model))
    unused = PARTS[2 - head]
    gradients = {name: param.grad is None for name, param in model.named_parameters()}
    assert gradients == {name: name.startswith(unused) for name in gradients}, gradients
    return left


@both_doors
@pytest.mark.parametrize("head", [0, 1])
def test_a_head_that_no_loss_uses_is_not_left_whole(door: str, head: int, tmp_path: Path) -> None:
    assert run(tmp_path, SIZE, _use_one_head, door, head) == [[[]] * len(STEPS)] * SIZE


def _backward_twice(context: RankContext, door: str) -> tuple[list[str], list[int]]:
    model = _shard_fork(door)
    left, right = model(inputs_of(context.rank))
    counts: list[int] = []
    for loss, options in ((right, {"retain_graph": True}), (left, {})):
        model.set_is_last_backward(loss is left)  # type: ignore[operator]  # of the sharded class
        with context.recorder.during(Phase.BACKWARD, step=len(counts)):
            loss.sum().backward(**options)
        entries = [e for e in context.recorder.ledger() if e.step == len(counts)]
        counts.append(sum(e.op is Op.REDUCE_SCATTER for e in entries))
    plain = Fork()
    for rank in range(SIZE):
        (sum(o.sum() for o in plain(inputs_of(rank))) / SIZE).backward()
    expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    assert_gradients(model, expected)
    return _left_whole(model), counts


@both_doors
def test_two_backwards_through_one_forward(door: str, tmp_path: Path) -> None:
    # Each reduces what it reached: a head and the trunk.
    assert run(tmp_path, SIZE, _backward_twice, door) == [([], [2, 2])] * SIZE
