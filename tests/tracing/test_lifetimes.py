"""Lifetimes: kinds of memory, and the events that the watch sees."""

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


class _RankMemory:
    """A rank's memory, recorded by hand; each call is an event in ``phase``."""

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


def _gathered(unit: str = "a") -> _RankMemory:
    """Return the memory of a rank that packs a share and gathers it into a buffer."""
    memory = _RankMemory()
    memory.share(SHARE, unit)
    memory.born(INPUT, BUFFER)
    memory.copied(SHARE, INPUT)
    memory.event().gathered([INPUT], [BUFFER])
    return memory


def test_the_source_of_a_copy_after_a_gather_is_staging_and_its_target_is_gathered() -> None:
    memory = _gathered()
    memory.born(WHOLE)
    memory.copied(BUFFER, WHOLE)
    memory.event().computed([WHOLE])
    kinds = [memory.kind(key) for key in (SHARE, INPUT, BUFFER, WHOLE)]
    assert kinds == [MemoryKind.SHARDED, MemoryKind.STAGING, MemoryKind.STAGING, MemoryKind.GATHERED]
    assert memory.units(WHOLE) == memory.units(BUFFER) == ["a"]


@pytest.mark.parametrize("is_used", [True, False])
def test_a_gather_that_nothing_is_copied_out_of_is_gathered_itself(is_used: bool) -> None:
    memory = _gathered()
    if is_used:
        memory.event().computed([BUFFER])
    assert memory.kind(BUFFER) is MemoryKind.GATHERED


def test_a_buffer_in_a_computation_stays_gathered_though_a_part_of_it_is_kept() -> None:
    memory = _gathered()
    memory.event().computed([BUFFER])
    memory.born(WHOLE)
    memory.copied(BUFFER, WHOLE)
    assert memory.kind(BUFFER) is memory.kind(WHOLE) is MemoryKind.GATHERED


def test_a_part_that_is_gathered_again_stays_gathered() -> None:
    memory = _gathered()
    memory.event().computed([BUFFER])
    memory.born(WHOLE, 4)
    memory.copied(BUFFER, WHOLE)
    memory.copied(WHOLE, 4)
    memory.event().gathered([4], [4])
    assert memory.kind(WHOLE) is MemoryKind.GATHERED


def test_a_gather_of_memory_that_is_no_share_is_other() -> None:
    memory = _RankMemory()
    memory.born(INPUT, BUFFER)
    memory.event().gathered([INPUT], [BUFFER])
    assert memory.kind(BUFFER) is memory.kind(INPUT) is MemoryKind.OTHER


def test_a_copy_of_shares_is_gathered_once_it_is_computed_with() -> None:
    memory = _RankMemory()
    memory.share(SHARE, "a")
    memory.born(WHOLE, BUFFER)
    memory.copied(SHARE, WHOLE)
    memory.copied(SHARE, BUFFER)
    memory.event().computed([WHOLE])
    assert memory.kind(WHOLE) is MemoryKind.GATHERED
    assert memory.kind(BUFFER) is MemoryKind.OTHER


def test_a_buffer_that_is_used_again_has_a_life_for_each_unit() -> None:
    memory = _gathered("a")
    memory.born(WHOLE)
    memory.copied(BUFFER, WHOLE)
    memory.share(4, "b")
    memory.copied(4, INPUT)
    memory.event().gathered([INPUT], [BUFFER])
    memory.born(5)
    memory.copied(BUFFER, 5)
    assert memory.units(BUFFER) == ["a", "b"]
    first, second = (life for life in memory.lives.report() if life.operator == f"make {BUFFER}")
    assert first.died == second.born
    assert first.kind is second.kind is MemoryKind.STAGING


def test_memory_that_is_released_and_taken_again_has_another_life() -> None:
    memory = _gathered()
    memory.event().resized(BUFFER, 0, "resize_", "")
    memory.event().resized(BUFFER, 8, "resize_", "")
    memory.event().gathered([INPUT], [BUFFER])
    lives = [life for life in memory.lives.report() if life.unit == "a" and life.kind is MemoryKind.GATHERED]
    assert [(life.num_bytes, life.died is None) for life in lives] == [(8, False), (8, True)]


def test_roles_that_an_owner_gave_outlive_a_resize() -> None:
    memory = _RankMemory()
    memory.share(SHARE, "a")
    memory.event().resized(SHARE, 16, "resize_", "")
    assert [life.kind for life in memory.lives.report()] == [MemoryKind.SHARDED, MemoryKind.SHARDED]
    assert memory.lives.has_role(SHARE, Role.SHARE)


def test_a_share_that_was_resized_is_that_units_still_and_other_memory_no_ones() -> None:
    memory = _RankMemory()
    memory.share(SHARE, "a")
    memory.born(4)
    memory.lives.is_role(4, Role.USER, "b")
    memory.event().resized(SHARE, 16, "resize_", "")
    memory.event().resized(4, 16, "resize_", "")
    memory.born(INPUT, BUFFER)
    memory.copied(SHARE, INPUT)
    memory.event().gathered([INPUT], [BUFFER])
    resized = [life for life in memory.lives.report() if life.operator == "resize_"]
    assert [(life.kind, life.unit) for life in resized] == [
        (MemoryKind.SHARDED, "a"),
        (MemoryKind.USER, None),
    ]
    assert memory.units(BUFFER) == ["a"]


def test_a_reduced_gradient_belongs_to_its_unit_and_is_no_share() -> None:
    memory = _RankMemory()
    memory.born(GRADIENT, INPUT, BUFFER)
    memory.lives.is_role(GRADIENT, Role.REDUCED, "a")
    memory.copied(GRADIENT, INPUT)
    memory.event().gathered([INPUT], [BUFFER])  # as a norm's, or a logger's
    assert memory.units(GRADIENT) == ["a"]
    assert memory.kind(GRADIENT) is MemoryKind.REDUCED
    assert memory.kind(BUFFER) is MemoryKind.OTHER


def test_a_copy_into_shares_leaves_them_shares_and_those_of_their_own_unit() -> None:
    memory = _gathered()
    memory.share(4, "b")
    memory.event().copied([BUFFER], [4], is_packing=False)  # as loading does, of another unit's
    memory.event().computed([4])
    memory.born(5, 6)
    memory.copied(4, 5)
    memory.event().gathered([5], [6])
    assert memory.kind(4) is MemoryKind.SHARDED
    assert memory.units(4) == memory.units(6) == ["b"]


def test_a_copy_of_whole_and_other_memory_is_whole() -> None:
    memory = _gathered()
    memory.born(4, WHOLE, 5)
    memory.event().copied([BUFFER, 4], [WHOLE], is_packing=True)
    memory.event().copied([4], [5], is_packing=True)
    assert memory.kind(WHOLE) is MemoryKind.GATHERED
    assert memory.units(WHOLE) == ["a"]
    assert memory.kind(5) is MemoryKind.OTHER


def test_memory_packed_for_no_reduction_is_no_gradient() -> None:
    memory = _RankMemory()
    memory.phase = Phase.BACKWARD
    memory.born(GRADIENT, PACKED, ROW, 20, 21)
    memory.copied(20, 21)
    memory.copied(GRADIENT, PACKED)
    memory.event().reduced([PACKED], [ROW], is_scattered=True)
    assert memory.kind(20) is memory.kind(21) is MemoryKind.OTHER
    assert memory.kind(GRADIENT) is MemoryKind.GRADIENT


def test_a_gradient_added_to_itself_stays_a_gradient() -> None:
    memory = _RankMemory()
    memory.phase = Phase.BACKWARD
    memory.born(GRADIENT)
    memory.event().summed([GRADIENT], [GRADIENT], is_packing=True)
    memory.event().reduced([GRADIENT], [GRADIENT], is_scattered=False)
    assert memory.kind(GRADIENT) is MemoryKind.GRADIENT


GRADIENT, PACKED, ROW = 10, 11, 12


def test_memory_packed_for_a_reduction_is_a_gradient() -> None:
    memory = _RankMemory()
    memory.phase = Phase.BACKWARD
    memory.born(GRADIENT, PACKED, ROW)
    memory.copied(GRADIENT, PACKED)
    memory.event().reduced([PACKED], [ROW], is_scattered=True)
    kinds = [memory.kind(key) for key in (GRADIENT, PACKED, ROW)]
    assert kinds == [MemoryKind.GRADIENT, MemoryKind.STAGING, MemoryKind.REDUCED]


def test_a_gradient_that_is_reduced_as_it_is_stays_one() -> None:
    memory = _RankMemory()
    memory.phase = Phase.BACKWARD
    memory.born(GRADIENT)
    memory.event().reduced([GRADIENT], [GRADIENT], is_scattered=False)
    assert memory.kind(GRADIENT) is MemoryKind.GRADIENT


def test_gradients_are_found_through_casts_sums_and_packing() -> None:
    memory = _RankMemory()
    memory.phase = Phase.BACKWARD
    memory.born(GRADIENT, 20, 21, PACKED, 22, ROW)
    memory.copied(20, GRADIENT, is_packing=False)  # a cast
    memory.event().summed([21], [GRADIENT])  # another microbatch's
    memory.copied(GRADIENT, PACKED)
    memory.copied(PACKED, 22)  # packed once more
    memory.event().reduced([22], [ROW], is_scattered=True)
    assert [memory.kind(key) for key in (20, 21, GRADIENT)] == [MemoryKind.GRADIENT] * 3
    assert memory.kind(PACKED) is memory.kind(22) is MemoryKind.STAGING


def test_gradients_of_parameters_of_the_optimizer_are_reduced() -> None:
    memory = _RankMemory()
    memory.phase = Phase.BACKWARD
    memory.born(GRADIENT, PACKED)
    memory.copied(GRADIENT, PACKED)
    memory.event().reduced([PACKED], [PACKED], is_scattered=False)
    memory.copied(PACKED, GRADIENT)
    memory.lives.is_role(GRADIENT, Role.REDUCED, "a")
    assert memory.kind(GRADIENT) is MemoryKind.REDUCED
    assert memory.kind(PACKED) is MemoryKind.STAGING


def test_memory_made_in_a_step_is_the_optimizers_and_the_rest_is_other() -> None:
    memory = _RankMemory()
    memory.born(30)
    memory.phase = Phase.STEP
    memory.born(31, 32)
    memory.lives.is_role(32, Role.USER)
    assert [memory.kind(key) for key in (30, 31, 32)] == [
        MemoryKind.OTHER,
        MemoryKind.OPTIMIZER,
        MemoryKind.USER,
    ]


def test_lives_of_no_bytes_or_of_no_time_are_not_reported() -> None:
    memory = _RankMemory()
    memory.born(40, num_bytes=0)
    memory.born(41)
    memory.lives.died(41)
    memory.lives.died(42)  # never seen: no matter
    assert memory.lives.report() == ()


def test_stretches_record_the_position_of_the_loop() -> None:
    memory = _RankMemory()
    memory.born(1, 2)
    memory.phase = Phase.BACKWARD
    memory.born(3)
    assert [(s.start, s.phase) for s in memory.lives.stretches()] == [(1, Phase.FORWARD), (3, Phase.BACKWARD)]


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
        tensors = watch.report().user_tensors
    assert ["resized to 0 at tests/tracing/test_lifetimes.py" in tensor.change for tensor in tensors] == [
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
        (user_tensor,) = watch.report().user_tensors
    assert "exchanged" in user_tensor.change


def test_a_tensor_whose_memory_is_gone_when_it_is_met_is_reported() -> None:
    with _watched() as watch:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        watch.holds("mine", (tensor,))
        (user_tensor,) = watch.report().user_tensors
    assert "0 were left" in user_tensor.change


def test_tensors_that_the_user_lets_go_of_are_no_loss() -> None:
    with _watched() as watch:
        tensor = torch.ones(4)
        watch.holds("mine", (tensor,))
        del tensor
        watch.end_step()
        (user_tensor,) = watch.report().user_tensors
    assert user_tensor == UserTensor(name="mine", num_bytes=16)


def test_memory_made_while_the_harness_looks_is_left_out() -> None:
    recorder = Recorder()
    with _watched(recorder) as watch:
        with recorder.during(Phase.OBSERVE):
            made = torch.ones(4)
        assert _alive(watch) == []
        made.add_(1)  # used by the engine: now it counts
        assert _alive(watch) == [("add_", 16)]


def test_one_mode_serves_both_watches() -> None:
    with watching(frozenset(Watch), Recorder()) as watches:
        assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 1
        kept = torch.ones(4) + 1
    assert watches.races is not None
    assert watches.lifetimes is not None
    assert watches.races.report().num_touches == 3
    assert ("add", kept.nbytes) in [(x.operator, x.num_bytes) for x in watches.lifetimes.report().lives]


def test_no_watch_runs_unless_asked_for() -> None:
    with watching(frozenset(), Recorder()) as watches:
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        assert "resize_" not in vars(torch.UntypedStorage)
    assert watches.races is None
    assert watches.lifetimes is None
