"""Lifetimes: what memory was for, what was alive when, what the laws make of it, and what the watch sees."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.contract import Layout, Plan, Shard
from fixtures.chain import CHAIN
from fixtures.optimizers import SGD
from harness.case import Schedule, Training, Watch
from harness.law import Evidence, Law
from harness.ledger.entry import Phase
from harness.ledger.expectation import Between, Exactly
from harness.ledger.recorder import Place, Recorder
from harness.lifetimes.amounts import Left, NoLeaks, Peak, When
from harness.lifetimes.in_turn import UnshardedInTurn
from harness.lifetimes.lives import Lives, Role
from harness.lifetimes.report import (
    Kind,
    Life,
    LifetimeReport,
    Stretch,
    UserTensor,
    report_from_json,
    report_to_json,
)
from harness.lifetimes.timeline import last_of, moments
from harness.lifetimes.user_tensors import UserTensorsLive
from harness.lifetimes.watch import LifetimeWatch
from harness.oracle import run_oracle
from harness.watching import watching
from tests.simulated_engine import simulate

# Lives ------------------------------------------------------------------------------------------------------

SHARE, INPUT, BUFFER, WHOLE = 0, 1, 2, 3


class _Told:
    """A rank's memory told of by hand; each call is an event in ``phase``."""

    def __init__(self) -> None:
        self.lives = Lives()
        self.phase = Phase.FORWARD

    def event(self) -> Lives:
        self.lives.advance(Place(self.phase, 0, 0, None))
        return self.lives

    def born(self, *keys: int, num_bytes: int = 8) -> None:
        for key in keys:
            self.event().born(key, num_bytes, f"make {key}", "")

    def share(self, key: int, unit: str) -> None:
        self.born(key)
        self.lives.is_role(key, Role.SHARE, unit)

    def copied(self, source: int, target: int, *, is_packing: bool = True) -> None:
        self.event().copied([source], [target], is_packing=is_packing)

    def kinds(self) -> dict[str, Kind]:
        return {life.operator: life.kind for life in self.lives.told()}

    def kind(self, key: int) -> Kind:
        return self.kinds()[f"make {key}"]

    def units(self, key: int) -> list[str | None]:
        return [life.unit for life in self.lives.told() if life.operator == f"make {key}"]


def _gathered(unit: str = "a") -> _Told:
    """Tell of a share that is packed and gathered into a buffer."""
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
    assert kinds == [Kind.SHARDED, Kind.STAGING, Kind.STAGING, Kind.GATHERED]
    assert told.units(WHOLE) == told.units(BUFFER) == ["a"]


@pytest.mark.parametrize("is_used", [True, False])
def test_a_gather_that_nothing_is_copied_out_of_is_gathered_itself(is_used: bool) -> None:
    told = _gathered()
    if is_used:
        told.event().computed([BUFFER])
    assert told.kind(BUFFER) is Kind.GATHERED


def test_what_is_computed_with_stays_gathered_though_a_part_of_it_is_kept() -> None:
    told = _gathered()
    told.event().computed([BUFFER])
    told.born(WHOLE)
    told.copied(BUFFER, WHOLE)
    assert told.kind(BUFFER) is told.kind(WHOLE) is Kind.GATHERED


def test_a_part_that_is_gathered_again_stays_gathered() -> None:
    told = _gathered()
    told.event().computed([BUFFER])
    told.born(WHOLE, 4)
    told.copied(BUFFER, WHOLE)
    told.copied(WHOLE, 4)
    told.event().gathered([4], [4])
    assert told.kind(WHOLE) is Kind.GATHERED


def test_a_gather_of_what_are_no_shares_is_nothing_to_us() -> None:
    told = _Told()
    told.born(INPUT, BUFFER)
    told.event().gathered([INPUT], [BUFFER])
    assert told.kind(BUFFER) is told.kind(INPUT) is Kind.OTHER


def test_a_copy_of_shares_is_gathered_once_it_is_computed_with() -> None:
    told = _Told()
    told.share(SHARE, "a")
    told.born(WHOLE, BUFFER)
    told.copied(SHARE, WHOLE)
    told.copied(SHARE, BUFFER)
    told.event().computed([WHOLE])
    assert told.kind(WHOLE) is Kind.GATHERED
    assert told.kind(BUFFER) is Kind.OTHER


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
    first, second = (life for life in told.lives.told() if life.operator == f"make {BUFFER}")
    assert first.died == second.born
    assert first.kind is second.kind is Kind.STAGING


def test_memory_that_is_given_back_and_taken_again_is_another_life() -> None:
    told = _gathered()
    told.event().resized(BUFFER, 0, "resize_", "")
    told.event().resized(BUFFER, 8, "resize_", "")
    told.event().gathered([INPUT], [BUFFER])
    lives = [life for life in told.lives.told() if life.unit == "a" and life.kind is Kind.GATHERED]
    assert [(life.num_bytes, life.died is None) for life in lives] == [(8, False), (8, True)]


def test_roles_that_an_owner_gave_outlive_a_resize() -> None:
    told = _Told()
    told.share(SHARE, "a")
    told.event().resized(SHARE, 16, "resize_", "")
    assert [life.kind for life in told.lives.told()] == [Kind.SHARDED, Kind.SHARDED]
    assert told.lives.has_role(SHARE, Role.SHARE)


GRADIENT, PACKED, ROW = 10, 11, 12


def test_gradients_are_what_was_packed_for_a_reduction() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT, PACKED, ROW)
    told.copied(GRADIENT, PACKED)
    told.event().reduced([PACKED], [ROW], is_scattered=True)
    kinds = [told.kind(key) for key in (GRADIENT, PACKED, ROW)]
    assert kinds == [Kind.GRADIENT, Kind.STAGING, Kind.REDUCED]


def test_a_gradient_that_is_reduced_as_it_is_stays_one() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT)
    told.event().reduced([GRADIENT], [GRADIENT], is_scattered=False)
    assert told.kind(GRADIENT) is Kind.GRADIENT


def test_gradients_are_found_through_casts_sums_and_packing() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT, 20, 21, PACKED, 22, ROW)
    told.copied(20, GRADIENT, is_packing=False)  # a cast
    told.event().summed([21], [GRADIENT])  # another microbatch's
    told.copied(GRADIENT, PACKED)
    told.copied(PACKED, 22)  # packed once more
    told.event().reduced([22], [ROW], is_scattered=True)
    assert [told.kind(key) for key in (20, 21, GRADIENT)] == [Kind.GRADIENT] * 3
    assert told.kind(PACKED) is told.kind(22) is Kind.STAGING


def test_what_the_optimizers_parameters_have_is_reduced() -> None:
    told = _Told()
    told.phase = Phase.BACKWARD
    told.born(GRADIENT, PACKED)
    told.copied(GRADIENT, PACKED)
    told.event().reduced([PACKED], [PACKED], is_scattered=False)
    told.copied(PACKED, GRADIENT)
    told.lives.is_role(GRADIENT, Role.REDUCED, "a")
    assert told.kind(GRADIENT) is Kind.REDUCED
    assert told.kind(PACKED) is Kind.STAGING


def test_what_a_step_makes_is_the_optimizers_and_the_rest_is_other() -> None:
    told = _Told()
    told.born(30)
    told.phase = Phase.STEP
    told.born(31, 32)
    told.lives.is_role(32, Role.USER)
    assert [told.kind(key) for key in (30, 31, 32)] == [Kind.OTHER, Kind.OPTIMIZER, Kind.USER]


def test_lives_of_no_bytes_or_of_no_time_are_not_told() -> None:
    told = _Told()
    told.born(40, num_bytes=0)
    told.born(41)
    told.lives.died(41)
    told.lives.died(42)  # never seen: no matter
    assert told.lives.told() == ()


def test_stretches_tell_where_the_loop_stood() -> None:
    told = _Told()
    told.born(1, 2)
    told.phase = Phase.BACKWARD
    told.born(3)
    assert [(s.start, s.phase) for s in told.lives.stretches()] == [(1, Phase.FORWARD), (3, Phase.BACKWARD)]


# Reports and timelines --------------------------------------------------------------------------------------


def _life(
    born: int,
    died: int | None,
    *,
    kind: Kind = Kind.GATHERED,
    unit: str | None = "blocks.0",
    num_bytes: int = 8,
) -> Life:
    return Life(
        kind=kind, unit=unit, num_bytes=num_bytes, born=born, died=died, operator="op", site="file.py:1"
    )


def _stretch(
    start: int, phase: Phase, *, step: int = 0, microbatch: int = 0, unit: str | None = None
) -> Stretch:
    return Stretch(start=start, phase=phase, step=step, microbatch=microbatch, unit=unit)


REPORT = LifetimeReport(
    num_events=9,
    num_collectives=1,
    lives=(_life(1, 4), _life(3, None, kind=Kind.STAGING, unit=None)),
    stretches=(_stretch(1, Phase.FORWARD), _stretch(5, Phase.BACKWARD)),
    user_tensors=(UserTensor(name="an input", num_bytes=4, change="gone"),),
)


def test_a_report_survives_json() -> None:
    assert report_from_json(json.loads(json.dumps(report_to_json(REPORT)))) == REPORT


def test_moments_tell_what_was_alive() -> None:
    seen = list(moments(REPORT, lambda s: s.phase is Phase.FORWARD))
    assert [m.event for m in seen] == [1, 2, 3, 4]
    assert [m.num_bytes((Kind.GATHERED, Kind.STAGING)) for m in seen] == [8, 8, 16, 8]
    assert [m.units(Kind.GATHERED) for m in seen] == [{"blocks.0"}] * 3 + [frozenset()]


def test_the_last_event_of_a_phase_is_before_the_next_stretch() -> None:
    end = last_of(REPORT, 0, 0, Phase.FORWARD)
    assert end is not None
    assert end.event == 4
    assert last_of(REPORT, 1, 0, Phase.FORWARD) is None


# Laws -------------------------------------------------------------------------------------------------------

UNITS = ("blocks.0", "blocks.1", "blocks.2")


@cache
def _silent(steps: int) -> Evidence:
    """Give two ranks that nobody watched."""
    plan = Plan(layout=Layout.REPLICATE, units=UNITS)
    training = Training(problem=CHAIN, optimizer=SGD, plan=plan, schedule=Schedule(steps=steps))
    ranks = tuple(simulate(training, 2, layout=Layout.REPLICATE))
    return Evidence(training=training, world_size=2, ranks=ranks, oracle=run_oracle(training, 2))


def _evidence(report: LifetimeReport | None, *, steps: int = 1) -> Evidence:
    """Give two ranks with this report."""
    silent = _silent(steps)
    ranks = tuple(replace(rank, lifetime_report=report) for rank in silent.ranks)
    return replace(silent, ranks=ranks)


def _verdict(law: Law, report: LifetimeReport | None, *, steps: int = 1) -> tuple[bool, str]:
    record = law.judge(_evidence(report, steps=steps)).record
    return record.held, record.summary


LAWS: tuple[Law, ...] = (
    UnshardedInTurn(phase=Phase.FORWARD),
    Left(kinds=(Kind.GATHERED,), after=When.FORWARD, expected=Exactly(0)),
    Peak(kinds=(Kind.GATHERED,), phase=Phase.FORWARD, expected=Between(0, 1)),
    NoLeaks(),
    UserTensorsLive(at_least=()),
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize(
    "report", [None, LifetimeReport(num_events=0, num_collectives=0)], ids=["no watch", "blind watch"]
)
def test_no_law_holds_of_ranks_that_nobody_watched(law: Law, report: LifetimeReport | None) -> None:
    is_held, summary = _verdict(law, report, steps=3)
    assert not is_held
    assert "rank 0" in summary


def test_a_law_looks_at_every_rank() -> None:
    evidence = _evidence(_walk({}))
    first, second = evidence.ranks
    blind = replace(evidence, ranks=(first, replace(second, lifetime_report=None)))
    law = UnshardedInTurn(phase=Phase.FORWARD)
    assert law.judge(evidence).record.held
    record = law.judge(blind).record
    assert not record.held
    assert "rank 1" in record.summary


def _walk(extra: dict[str, tuple[int, int]], phase: Phase = Phase.FORWARD) -> LifetimeReport:
    """Give each unit a turn of ten events, in which it is gathered from the third to the eighth; add other lives.

    Backward takes the last unit first. ``extra`` are units with when they are gathered besides.
    """
    order = UNITS if phase is Phase.FORWARD else UNITS[::-1]
    lives, stretches = [], []
    for index, unit in enumerate(order):
        stretches.append(_stretch(10 * index, phase, unit=unit))
        lives.append(_life(10 * index + 2, 10 * index + 8, unit=unit))
    lives += [_life(born, died, unit=unit) for unit, (born, died) in extra.items()]
    return LifetimeReport(num_events=30, num_collectives=3, lives=tuple(lives), stretches=tuple(stretches))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize(
    ("events", "whose", "ahead", "is_held"),
    [
        pytest.param((0, 1), 0, 0, True, id="nothing-more"),
        pytest.param((0, 30), -1, 0, True, id="root"),
        pytest.param((8, 9), 1, 1, True, id="one-ahead"),
        pytest.param((5, 9), 1, 0, False, id="ahead-though-none-may-be"),
        pytest.param((5, 9), 2, 1, False, id="two-ahead"),
        pytest.param((9, 10), 2, 1, True, id="the-next-one's-hook-comes-before-ours"),
        pytest.param((8, 13), 0, 1, False, id="kept-into-the-next-turn"),
        pytest.param((8, 30), 0, 1, False, id="kept-to-the-end"),
    ],
)
def test_units_are_gathered_in_turn_or_named(
    phase: Phase, events: tuple[int, int], whose: int, ahead: int, is_held: bool
) -> None:
    order = UNITS if phase is Phase.FORWARD else UNITS[::-1]
    unit = "" if whose < 0 else order[whose]
    held, summary = _verdict(UnshardedInTurn(phase=phase, ahead=ahead), _walk({unit: events}, phase))
    assert held is is_held
    assert held or repr(unit) in summary


def test_a_unit_that_computes_sharded_breaks_the_law() -> None:
    report = _walk({})
    report = replace(report, lives=tuple(life for life in report.lives if life.unit != "blocks.1"))
    held, summary = _verdict(UnshardedInTurn(phase=Phase.FORWARD), report)
    assert not held
    assert "expected it gathered" in summary


def test_a_unit_without_a_turn_breaks_the_law() -> None:
    report = _walk({})
    report = replace(report, stretches=report.stretches[:2])
    held, summary = _verdict(UnshardedInTurn(phase=Phase.FORWARD), report)
    assert not held
    assert "'blocks.2'" in summary


@pytest.mark.parametrize(
    ("phase", "whose", "is_held"),
    [
        (Phase.FORWARD, 0, True),  # has run, and waits for backward
        (Phase.FORWARD, 2, False),  # is still to run
        (Phase.BACKWARD, 0, False),  # has run backward
        (Phase.BACKWARD, 2, True),  # waits for its backward
    ],
)
def test_what_is_kept_waits_for_its_backward(phase: Phase, whose: int, is_held: bool) -> None:
    order = UNITS if phase is Phase.FORWARD else UNITS[::-1]
    law = UnshardedInTurn(phase=phase, ahead=0, keeps=True)
    held, _ = _verdict(law, _walk({order[whose]: (11, 17)}, phase))
    assert held is is_held


def test_a_buffer_of_the_unit_before_may_stay_one_turn() -> None:
    report = _walk({})
    late = replace(report, lives=(*report.lives, _life(2, 15, kind=Kind.STAGING, unit="blocks.0")))
    later = replace(report, lives=(*report.lives, _life(2, 25, kind=Kind.STAGING, unit="blocks.0")))
    law = UnshardedInTurn(phase=Phase.FORWARD)
    assert _verdict(law, late)[0]
    assert not _verdict(law, later)[0]


@pytest.mark.parametrize(("died", "is_held"), [(5, True), (6, False), (None, False)])
def test_what_is_left_is_what_the_last_event_of_a_phase_shows(died: int | None, is_held: bool) -> None:
    report = LifetimeReport(
        num_events=8,
        num_collectives=1,
        lives=(_life(1, died),),
        stretches=(_stretch(1, Phase.FORWARD), _stretch(6, Phase.BACKWARD)),
    )
    law = Left(kinds=(Kind.GATHERED,), after=When.FORWARD, expected=Exactly(0))
    assert _verdict(law, report)[0] is is_held


def test_that_nothing_is_left_of_what_never_was_shows_nothing() -> None:
    report = LifetimeReport(
        num_events=8,
        num_collectives=1,
        lives=(_life(1, 2, kind=Kind.OTHER),),
        stretches=(_stretch(1, Phase.FORWARD),),
    )
    law = Left(kinds=(Kind.GATHERED,), after=When.FORWARD, expected=Exactly(0))
    assert not _verdict(law, report)[0]


@pytest.mark.parametrize(
    ("expected", "is_held"), [(Exactly(24), True), (Between(0, 23), False), (Exactly(25), False)]
)
def test_a_peak_is_the_most_at_one_event(expected: Exactly | Between, is_held: bool) -> None:
    report = LifetimeReport(
        num_events=9,
        num_collectives=1,
        lives=(_life(1, 5), _life(4, 9, num_bytes=16), _life(5, 9, num_bytes=4), _life(7, 9, num_bytes=90)),
        stretches=(_stretch(1, Phase.FORWARD), _stretch(7, Phase.BACKWARD)),
    )
    law = Peak(kinds=(Kind.GATHERED,), phase=Phase.FORWARD, expected=expected)
    held, summary = _verdict(law, report)
    assert held is is_held
    assert held or "24 (gathered of 'blocks.0' 24)" in summary


@pytest.mark.parametrize("law", [Left, Peak])
@pytest.mark.parametrize(
    ("owns_nothing_of", "is_held"),
    [((), False), (("gain",), False), (("gain", "shift", "blocks.3.weight", "blocks.3.bias"), True)],
)
@pytest.mark.parametrize("kind", [Kind.GATHERED, Kind.GRADIENT])
def test_what_a_rank_gathers_and_owns_nothing_of_may_be_missing_there(
    law: type[Left | Peak], owns_nothing_of: tuple[str, ...], is_held: bool, kind: Kind
) -> None:
    """The root has gains, shifts and a block: 18 and 10 x 21 elements of four bytes."""
    report = LifetimeReport(
        num_events=8,
        num_collectives=1,
        lives=(_life(1, None, kind=kind, num_bytes=24),),
        stretches=(_stretch(1, Phase.FORWARD),),
    )
    expected = Exactly(24 + 912)
    judged: Law = (
        Left(kinds=(kind,), after=When.FORWARD, expected=expected)
        if law is Left
        else Peak(kinds=(kind,), phase=Phase.FORWARD, expected=expected)
    )
    evidence = _evidence(report)
    ranks = tuple(
        replace(rank, initial={**rank.initial, **{n: _emptied(rank.initial[n]) for n in owns_nothing_of}})
        for rank in evidence.ranks
    )
    assert judged.judge(replace(evidence, ranks=ranks)).record.held is (is_held and kind is Kind.GATHERED)
    one = replace(evidence, ranks=(ranks[0], evidence.ranks[1]))
    record = judged.judge(one).record
    assert not record.held
    assert record.summary.startswith("rank 1" if is_held and kind is Kind.GATHERED else "rank 0")


def _emptied(shard: Shard) -> Shard:
    return replace(shard, tensor=shard.tensor[:0])


def _steps(*lives: Life, num_steps: int = 4) -> LifetimeReport:
    """Give steps of ten events each, all of the optimizer's phase."""
    stretches = tuple(_stretch(10 * s, Phase.STEP, step=s, microbatch=-1) for s in range(num_steps))
    return LifetimeReport(
        num_events=10 * num_steps, num_collectives=1, lives=(_life(0, None), *lives), stretches=stretches
    )


@pytest.mark.parametrize(
    ("lives", "is_held"),
    [
        pytest.param((), True, id="nothing"),
        pytest.param((_life(2, None, kind=Kind.OPTIMIZER),), True, id="made-in-the-first-step"),
        pytest.param(
            (_life(2, 12), _life(12, 22), _life(22, 32), _life(32, None)), True, id="one-for-another"
        ),
        pytest.param((_life(12, None),), True, id="made-in-the-second-step"),
        pytest.param((_life(22, None),), False, id="left-by-a-later-step"),
        pytest.param((_life(12, 22),), False, id="lost-by-a-later-step"),
        pytest.param((_life(22, None, kind=Kind.USER),), True, id="the-user's"),
        pytest.param((_life(2, 22), _life(22, None, kind=Kind.STAGING)), False, id="of-another-kind"),
    ],
)
def test_steps_leave_as_much_as_those_before(lives: tuple[Life, ...], is_held: bool) -> None:
    assert _verdict(NoLeaks(), _steps(*lives), steps=4)[0] is is_held


def test_a_leak_is_told_with_who_made_it() -> None:
    _, summary = _verdict(NoLeaks(), _steps(_life(22, None), _life(32, None)), steps=4)
    assert "step 2" in summary
    assert "never let go: 8 bytes of unit 'blocks.0' from op at file.py:1" in summary


def test_two_steps_are_too_few_to_compare() -> None:
    assert not _verdict(NoLeaks(), _steps(num_steps=2), steps=2)[0]


@pytest.mark.parametrize(
    ("name", "change", "is_held"),
    [("an input", "", True), ("an input", "it was resized", False), ("an output", "", False)],
)
def test_the_users_tensors_were_seen_and_let_alone(name: str, change: str, is_held: bool) -> None:
    tensors = (UserTensor(name=name, num_bytes=8, change=change),)
    law = UserTensorsLive(at_least=("an input",))
    assert _verdict(law, replace(REPORT, user_tensors=tensors))[0] is is_held


# The watch --------------------------------------------------------------------------------------------------


@contextmanager
def _watched(recorder: Recorder | None = None) -> Iterator[LifetimeWatch]:
    with watching(frozenset({Watch.LIFETIMES}), recorder or Recorder()) as watches:
        assert watches.lifetimes is not None
        yield watches.lifetimes


def _alive(watch: LifetimeWatch) -> list[tuple[str, int]]:
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
    assert ["resized to 0 at tests/test_lifetimes.py" in tensor.change for tensor in told] == [True] * is_held


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
