"""Lifetimes: what memory was for, and what the watch sees."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shardproof import Phase, Watch
from shardproof.harness.tracing.memory.allocations import Allocations, Role
from shardproof.harness.tracing.memory.memory_report import MemoryKind, UserTensor
from shardproof.harness.tracing.memory.tracker import MemoryTracker
from shardproof.harness.tracing.recorder import LoopPosition, Recorder
from shardproof.harness.training.watches import watching

# Lives ------------------------------------------------------------------------------------------------------

SHARE, INPUT, BUFFER, WHOLE = 0, 1, 2, 3


class _Told:
    """A rank's memory told of by hand; each call is an event in ``phase``."""

    def __init__(self) -> None:
        self.lives = Allocations()
        self.phase = Phase.FORWARD

    def event(self) -> Allocations:
        self.lives.advance(LoopPosition(self.phase, 0, 0, None))
        return self.lives

    def born(self, *keys: int, num_bytes: int = 8) -> None:
        for key in keys:
            self.event().born(key, num_bytes, f"make {key}", "")

    def share(self, key: int, unit: str) -> None:
        self.born(key)
        self.lives.is_role(key, Role.SHARE, unit)

    def copied(self, source: int, target: int, *, is_packing: bool = True) -> None:
        self.event().copied([source], [target], is_packing=is_packing)

    def kinds(self) -> dict[str, MemoryKind]:
        return {life.operator: life.kind for life in self.lives.report()}

    def kind(self, key: int) -> MemoryKind:
        return self.kinds()[f"make {key}"]

    def units(self, key: int) -> list[str | None]:
        return [life.unit for life in self.lives.report() if life.operator == f"make {key}"]


def _gathered(unit: str = "a") -> _Told:
    """Return of a share that is packed and gathered into a buffer."""
    told = _Told()
    told.share(SHARE, unit)
    told.born(INPUT, BUFFER)
    told.copied(SHARE, INPUT)
    told.event().gathered([INPUT], [BUFFER])
    return told


def test_what_a_gather_is_copied_out_of_is_staging_and_where_it_goes_is_gathered() -> None:
    told = _gathered()
    told.born(WHOLE)
    told.copied(BUFFER, WHOLE)
    told.event().computed([WHOLE])
    kinds = [told.kind(key) for key in (SHARE, INPUT, BUFFER, WHOLE)]
    assert kinds == [MemoryKind.SHARDED, MemoryKind.STAGING, MemoryKind.STAGING, MemoryKind.GATHERED]
    assert told.units(WHOLE) == told.units(BUFFER) == ["a"]


@pytest.mark.parametrize("is_used", [True, False])
def test_a_gather_that_nothing_is_copied_out_of_is_gathered_itself(is_used: bool) -> None:
    told = _gathered()
    if is_used:
        told.event().computed([BUFFER])
    assert told.kind(BUFFER) is MemoryKind.GATHERED


def test_what_is_computed_with_stays_gathered_though_a_part_of_it_is_kept() -> None:
    told = _gathered()
    told.event().computed([BUFFER])
    told.born(WHOLE)
    told.copied(BUFFER, WHOLE)
    assert told.kind(BUFFER) is told.kind(WHOLE) is MemoryKind.GATHERED


def test_a_part_that_is_gathered_again_stays_gathered() -> None:
    told = _gathered()
    told.event().computed([BUFFER])
    told.born(WHOLE, 4)
    told.copied(BUFFER, WHOLE)
    told.copied(WHOLE, 4)
    told.event().gathered([4], [4])
    assert told.kind(WHOLE) is MemoryKind.GATHERED


def test_a_gather_of_what_are_no_shares_is_nothing_to_us() -> None:
    told = _Told()
    told.born(INPUT, BUFFER)
    told.event().gathered([INPUT], [BUFFER])
    assert told.kind(BUFFER) is told.kind(INPUT) is MemoryKind.OTHER


def test_a_copy_of_shares_is_gathered_once_it_is_computed_with() -> None:
    told = _Told()
    told.share(SHARE, "a")
    told.born(WHOLE, BUFFER)
    told.copied(SHARE, WHOLE)
    told.copied(SHARE, BUFFER)
    told.event().computed([WHOLE])
    assert told.kind(WHOLE) is MemoryKind.GATHERED
    assert told.kind(BUFFER) is MemoryKind.OTHER


def test_a_buffer_that_is_used_again_has_a_life_for_each_unit() -> None:
    told = _gathered("a")
    told.born(WHOLE)
    told.copied(BUFFER, WHOLE)
    told.share(4, "b")
    told.copied(4, INPUT)
    told.event().gathered([INPUT], [BUFFER])
    told.born(5)
    told.copied(BUFFER, 5)
    assert told.units(BUFFER) == ["a", "b"]
    first, second = (life for life in told.lives.report() if life.operator == f"make {BUFFER}")
    assert first.died == second.born
    assert first.kind is second.kind is MemoryKind.STAGING


def test_memory_that_is_given_back_and_taken_again_is_another_life() -> None:
    told = _gathered()
    told.event().resized(BUFFER, 0, "resize_", "")
    told.event().resized(BUFFER, 8, "resize_", "")
    told.event().gathered([INPUT], [BUFFER])
    lives = [life for life in told.lives.report() if life.unit == "a" and life.kind is MemoryKind.GATHERED]
    assert [(life.num_bytes, life.died is None) for life in lives] == [(8, False), (8, True)]


def test_roles_that_an_owner_gave_outlive_a_resize() -> None:
    told = _Told()
    told.share(SHARE, "a")
    told.event().resized(SHARE, 16, "resize_", "")
    assert [life.kind for life in told.lives.report()] == [MemoryKind.SHARDED, MemoryKind.SHARDED]
    assert told.lives.has_role(SHARE, Role.SHARE)


def test_a_share_that_was_resized_is_that_units_still_and_other_memory_no_ones() -> None:
    told = _Told()
    told.share(SHARE, "a")
    told.born(4)
    told.lives.is_role(4, Role.USER, "b")
    told.event().resized(SHARE, 16, "resize_", "")
    told.event().resized(4, 16, "resize_", "")
    told.born(INPUT, BUFFER)
    told.copied(SHARE, INPUT)
    told.event().gathered([INPUT], [BUFFER])
    resized = [life for life in told.lives.report() if life.operator == "resize_"]
    assert [(life.kind, life.unit) for life in resized] == [
        (MemoryKind.SHARDED, "a"),
        (MemoryKind.USER, None),
    ]
    assert told.units(BUFFER) == ["a"]


def test_what_is_reduced_is_a_units_but_no_share_of_it() -> None:
    told = _Told()
    told.born(GRADIENT, INPUT, BUFFER)
    told.lives.is_role(GRADIENT, Role.REDUCED, "a")
    told.copied(GRADIENT, INPUT)
    told.event().gathered([INPUT], [BUFFER])  # as a norm's, or a logger's
    assert told.units(GRADIENT) == ["a"]
    assert told.kind(GRADIENT) is MemoryKind.REDUCED
    assert told.kind(BUFFER) is MemoryKind.OTHER


def test_a_copy_into_shares_leaves_them_shares_and_those_of_their_own_unit() -> None:
    told = _gathered()
    told.share(4, "b")
    told.event().copied([BUFFER], [4], is_packing=False)  # as loading does, of another unit's
    told.event().computed([4])
    told.born(5, 6)
    told.copied(4, 5)
    told.event().gathered([5], [6])
    assert told.kind(4) is MemoryKind.SHARDED
    assert told.units(4) == told.units(6) == ["b"]


def test_a_copy_of_whole_and_other_memory_is_whole() -> None:
    told = _gathered()
    told.born(4, WHOLE, 5)
    told.event().copied([BUFFER, 4], [WHOLE], is_packing=True)
    told.event().copied([4], [5], is_packing=True)
    assert told.kind(WHOLE) is MemoryKind.GATHERED
    assert told.units(WHOLE) == ["a"]
    assert told.kind(5) is MemoryKind.OTHER


def test_what_is_packed_for_no_reduction_is_no_gradient() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT, PACKED, ROW, 20, 21)
    told.copied(20, 21)
    told.copied(GRADIENT, PACKED)
    told.event().reduced([PACKED], [ROW], is_scattered=True)
    assert told.kind(20) is told.kind(21) is MemoryKind.OTHER
    assert told.kind(GRADIENT) is MemoryKind.GRADIENT


def test_what_is_added_to_itself_is_made_of_others_alone() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT)
    told.event().summed([GRADIENT], [GRADIENT], is_packing=True)
    told.event().reduced([GRADIENT], [GRADIENT], is_scattered=False)
    assert told.kind(GRADIENT) is MemoryKind.GRADIENT


GRADIENT, PACKED, ROW = 10, 11, 12


def test_gradients_are_what_was_packed_for_a_reduction() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT, PACKED, ROW)
    told.copied(GRADIENT, PACKED)
    told.event().reduced([PACKED], [ROW], is_scattered=True)
    kinds = [told.kind(key) for key in (GRADIENT, PACKED, ROW)]
    assert kinds == [MemoryKind.GRADIENT, MemoryKind.STAGING, MemoryKind.REDUCED]


def test_a_gradient_that_is_reduced_as_it_is_stays_one() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT)
    told.event().reduced([GRADIENT], [GRADIENT], is_scattered=False)
    assert told.kind(GRADIENT) is MemoryKind.GRADIENT


def test_gradients_are_found_through_casts_sums_and_packing() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT, 20, 21, PACKED, 22, ROW)
    told.copied(20, GRADIENT, is_packing=False)  # a cast
    told.event().summed([21], [GRADIENT])  # another microbatch's
    told.copied(GRADIENT, PACKED)
    told.copied(PACKED, 22)  # packed once more
    told.event().reduced([22], [ROW], is_scattered=True)
    assert [told.kind(key) for key in (20, 21, GRADIENT)] == [MemoryKind.GRADIENT] * 3
    assert told.kind(PACKED) is told.kind(22) is MemoryKind.STAGING


def test_what_the_optimizers_parameters_have_is_reduced() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT, PACKED)
    told.copied(GRADIENT, PACKED)
    told.event().reduced([PACKED], [PACKED], is_scattered=False)
    told.copied(PACKED, GRADIENT)
    told.lives.is_role(GRADIENT, Role.REDUCED, "a")
    assert told.kind(GRADIENT) is MemoryKind.REDUCED
    assert told.kind(PACKED) is MemoryKind.STAGING


def test_what_a_step_makes_is_the_optimizers_and_the_rest_is_other() -> None:
    told = _Told()
    told.born(30)
    told.phase = Phase.STEP
    told.born(31, 32)
    told.lives.is_role(32, Role.USER)
    assert [told.kind(key) for key in (30, 31, 32)] == [
        MemoryKind.OTHER,
        MemoryKind.OPTIMIZER,
        MemoryKind.USER,
    ]


def test_lives_of_no_bytes_or_of_no_time_are_not_told() -> None:
    told = _Told()
    told.born(40, num_bytes=0)
    told.born(41)
    told.lives.died(41)
    told.lives.died(42)  # never seen: no matter
    assert told.lives.report() == ()


def test_stretches_tell_where_the_loop_stood() -> None:
    told = _Told()
    told.born(1, 2)
    told.phase = Phase.BACKWARD
    told.born(3)
    assert [(s.start, s.phase) for s in told.lives.stretches()] == [(1, Phase.FORWARD), (3, Phase.BACKWARD)]


# The watch --------------------------------------------------------------------------------------------------


@contextmanager
def _watched(recorder: Recorder | None = None) -> Iterator[MemoryTracker]:
    with watching(frozenset({Watch.LIFETIMES}), recorder or Recorder()) as watches:
        assert watches.lifetimes is not None
        yield watches.lifetimes


def _alive(watch: MemoryTracker) -> list[tuple[str, int]]:
    gc.collect()
    watch.mark()
    return [(life.operator, life.num_bytes) for life in watch.report().lives if life.died is None]


def test_the_watch_sees_memory_from_its_birth_to_its_end() -> None:
    with _watched() as watch:
        tensor = torch.ones(4)
        doubled = tensor * 2
        view = doubled[1:]
        assert _alive(watch) == [("ones", 16), ("mul", 16)]
        del doubled
        assert _alive(watch) == [("ones", 16), ("mul", 16)]  # the view holds it
        del view
        assert _alive(watch) == [("ones", 16)]


def test_the_watch_sees_backward() -> None:
    with _watched() as watch:
        layer = torch.nn.Linear(3, 2)
        layer(torch.ones(1, 3)).sum().backward()
        assert layer.weight.grad is not None
        assert ("mm", 24) in _alive(watch)


@pytest.mark.parametrize("is_held", [True, False])
def test_the_watch_sees_resizes(is_held: bool) -> None:
    with _watched() as watch:
        tensor = torch.ones(4)
        if is_held:
            watch.holds("mine", (tensor,))
        tensor.untyped_storage().resize_(0)
        assert _alive(watch) == []
        told = watch.report().user_tensors
    assert ["resized to 0 at tests/tracing/test_lifetimes.py" in tensor.change for tensor in told] == [
        True
    ] * is_held


def test_the_watch_sees_growth() -> None:
    with _watched() as watch:
        tensor = torch.ones(1)
        tensor.resize_(8)
        tensor.fill_(1)  # growth in C++ is seen when the memory is touched next
        assert [num_bytes for _, num_bytes in _alive(watch)] == [32]


def test_the_watch_sees_that_a_tensor_has_other_memory() -> None:
    with _watched() as watch:
        tensor = torch.ones(4)
        watch.holds("mine", (tensor,))
        tensor.data = torch.zeros(2)
        watch.end_step()
        (told,) = watch.report().user_tensors
    assert "exchanged" in told.change


def test_a_tensor_whose_memory_is_gone_when_it_is_met_is_told() -> None:
    with _watched() as watch:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        watch.holds("mine", (tensor,))
        (told,) = watch.report().user_tensors
    assert "0 were left" in told.change


def test_tensors_that_the_user_lets_go_of_are_no_loss() -> None:
    with _watched() as watch:
        tensor = torch.ones(4)
        watch.holds("mine", (tensor,))
        del tensor
        watch.end_step()
        (told,) = watch.report().user_tensors
    assert told == UserTensor(name="mine", num_bytes=16)


def test_what_is_made_while_the_harness_looks_is_left_out() -> None:
    recorder = Recorder()
    with _watched(recorder) as watch:
        with recorder.during(Phase.OBSERVE):
            made = torch.ones(4)
        assert _alive(watch) == []
        made.add_(1)  # used by the engine: now it counts
        assert _alive(watch) == [("add_", 16)]


def test_both_watches_are_told_by_one_mode() -> None:
    with watching(frozenset(Watch), Recorder()) as watches:
        assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 1
        kept = torch.ones(4) + 1
    assert watches.races is not None
    assert watches.lifetimes is not None
    assert watches.races.report().num_touches == 3
    assert ("add", kept.nbytes) in [(x.operator, x.num_bytes) for x in watches.lifetimes.report().lives]


def test_nobody_watches_where_nobody_asks() -> None:
    with watching(frozenset(), Recorder()) as watches:
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        assert "resize_" not in vars(torch.UntypedStorage)
    assert watches.races is None
    assert watches.lifetimes is None
