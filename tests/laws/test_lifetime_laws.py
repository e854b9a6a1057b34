"""Lifetime reports list live memory, and laws judge it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from shardproof import AfterPhase, LiveBytes, PeakBytes, Phase, UnshardedOnlyInTurn, UserTensorsLive
from shardproof.engine.contract import Layout, Plan, Shard
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.cases.training import Schedule, Training
from shardproof.harness.laws.communication.bounds import Between, Exactly
from shardproof.harness.laws.law import Evidence, Law
from shardproof.harness.tracing.codec import decode, encode
from shardproof.harness.tracing.memory.memory_report import (
    ROWS,
    Allocation,
    LifetimeReport,
    LoopSpan,
    MemoryKind,
    UserTensor,
    last_of,
    moments,
)
from tests.simulated_engine import evidence_of

# Reports and timelines --------------------------------------------------------------------------------------


def _life(
    born: int,
    died: int | None,
    *,
    kind: MemoryKind = MemoryKind.GATHERED,
    unit: str | None = "blocks.0",
    num_bytes: int = 8,
) -> Allocation:
    return Allocation(
        kind=kind, unit=unit, num_bytes=num_bytes, born=born, died=died, operator="op", site="file.py:1"
    )


def _stretch(
    start: int, phase: Phase, *, step: int = 0, microbatch: int = 0, unit: str | None = None
) -> LoopSpan:
    return LoopSpan(start=start, phase=phase, step=step, microbatch=microbatch, unit=unit)


REPORT = LifetimeReport(
    num_events=9,
    num_collectives=1,
    lives=(_life(1, 4), _life(3, None, kind=MemoryKind.STAGING, unit=None)),
    stretches=(_stretch(1, Phase.FORWARD), _stretch(5, Phase.BACKWARD)),
    user_tensors=(UserTensor(name="an input", num_bytes=4, change="gone"),),
)


def test_a_report_survives_json() -> None:
    assert decode(LifetimeReport, json.loads(json.dumps(encode(REPORT, ROWS)))) == REPORT


def test_moments_list_live_memory() -> None:
    seen = list(moments(REPORT, lambda s: s.phase is Phase.FORWARD))
    assert [m.event for m in seen] == [1, 2, 3, 4]
    assert [m.num_bytes((MemoryKind.GATHERED, MemoryKind.STAGING)) for m in seen] == [8, 8, 16, 8]
    assert [m.units(MemoryKind.GATHERED) for m in seen] == [{"blocks.0"}] * 3 + [frozenset()]


def test_the_last_event_of_a_phase_is_before_the_next_stretch() -> None:
    end = last_of(REPORT, 0, 0, Phase.FORWARD)
    assert end is not None
    assert end.event == 4
    assert last_of(REPORT, 1, 0, Phase.FORWARD) is None


# Laws -------------------------------------------------------------------------------------------------------

UNITS = ("blocks.0", "blocks.1", "blocks.2")


@cache
def _silent(steps: int) -> Evidence:
    """Return two unwatched ranks."""
    plan = Plan(layout=Layout.REPLICATE, units=UNITS)
    training = Training(problem=CHAIN, optimizer=SGD, plan=plan, schedule=Schedule(steps=steps))
    return evidence_of(training, layout=Layout.REPLICATE)


def _evidence(report: LifetimeReport | None, *, steps: int = 1) -> Evidence:
    silent = _silent(steps)
    ranks = tuple(replace(rank, lifetime_report=report) for rank in silent.ranks)
    return replace(silent, ranks=ranks)


def _verdict(law: Law, report: LifetimeReport | None, *, steps: int = 1) -> tuple[bool, str]:
    record = law.judge(_evidence(report, steps=steps)).record
    return record.held, record.summary


LAWS: tuple[Law, ...] = (
    UnshardedOnlyInTurn(phase=Phase.FORWARD),
    LiveBytes(kinds=(MemoryKind.GATHERED,), after=AfterPhase.FORWARD, expected=Exactly(0)),
    PeakBytes(kinds=(MemoryKind.GATHERED,), phase=Phase.FORWARD, expected=Between(0, 1)),
    UserTensorsLive(at_least=()),
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize(
    "report", [None, LifetimeReport(num_events=0, num_collectives=0)], ids=["no watch", "blind watch"]
)
def test_no_law_holds_of_unwatched_ranks(law: Law, report: LifetimeReport | None) -> None:
    is_held, summary = _verdict(law, report, steps=3)
    assert not is_held
    assert "rank 0" in summary


def test_a_law_looks_at_every_rank() -> None:
    evidence = _evidence(_walk({}))
    first, second = evidence.ranks
    blind = replace(evidence, ranks=(first, replace(second, lifetime_report=None)))
    law = UnshardedOnlyInTurn(phase=Phase.FORWARD)
    assert law.judge(evidence).record.held
    record = law.judge(blind).record
    assert not record.held
    assert "rank 1" in record.summary


def _walk(extra: dict[str, tuple[int, int]], phase: Phase = Phase.FORWARD) -> LifetimeReport:
    """Return a turn of ten events for each unit, which is gathered from the third to the eighth; add other lives.

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
    held, summary = _verdict(UnshardedOnlyInTurn(phase=phase, ahead=ahead), _walk({unit: events}, phase))
    assert held is is_held
    assert held or repr(unit) in summary


def test_a_unit_that_computes_sharded_breaks_the_law() -> None:
    report = _walk({})
    report = replace(report, lives=tuple(life for life in report.lives if life.unit != "blocks.1"))
    held, summary = _verdict(UnshardedOnlyInTurn(phase=Phase.FORWARD), report)
    assert not held
    assert "expected it gathered" in summary


def test_a_unit_without_a_turn_breaks_the_law() -> None:
    report = _walk({})
    report = replace(report, stretches=report.stretches[:2])
    held, summary = _verdict(UnshardedOnlyInTurn(phase=Phase.FORWARD), report)
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
def test_a_kept_unit_waits_for_its_backward(phase: Phase, whose: int, is_held: bool) -> None:
    order = UNITS if phase is Phase.FORWARD else UNITS[::-1]
    law = UnshardedOnlyInTurn(phase=phase, ahead=0, keeps=True)
    held, _ = _verdict(law, _walk({order[whose]: (11, 17)}, phase))
    assert held is is_held


def test_a_buffer_of_the_unit_before_may_stay_one_turn() -> None:
    report = _walk({})
    late = replace(report, lives=(*report.lives, _life(2, 15, kind=MemoryKind.STAGING, unit="blocks.0")))
    later = replace(report, lives=(*report.lives, _life(2, 25, kind=MemoryKind.STAGING, unit="blocks.0")))
    law = UnshardedOnlyInTurn(phase=Phase.FORWARD)
    assert _verdict(law, late)[0]
    assert not _verdict(law, later)[0]


@pytest.mark.parametrize(("died", "is_held"), [(5, True), (6, False), (None, False)])
def test_leftover_memory_is_that_of_the_last_event_of_a_phase(died: int | None, is_held: bool) -> None:
    report = LifetimeReport(
        num_events=8,
        num_collectives=1,
        lives=(_life(1, died),),
        stretches=(_stretch(1, Phase.FORWARD), _stretch(6, Phase.BACKWARD)),
    )
    law = LiveBytes(kinds=(MemoryKind.GATHERED,), after=AfterPhase.FORWARD, expected=Exactly(0))
    assert _verdict(law, report)[0] is is_held


def test_the_absence_of_memory_that_never_existed_proves_nothing() -> None:
    report = LifetimeReport(
        num_events=8,
        num_collectives=1,
        lives=(_life(1, 2, kind=MemoryKind.OTHER),),
        stretches=(_stretch(1, Phase.FORWARD),),
    )
    law = LiveBytes(kinds=(MemoryKind.GATHERED,), after=AfterPhase.FORWARD, expected=Exactly(0))
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
    law = PeakBytes(kinds=(MemoryKind.GATHERED,), phase=Phase.FORWARD, expected=expected)
    held, summary = _verdict(law, report)
    assert held is is_held
    assert held or "24 (gathered of 'blocks.0' 24)" in summary


@pytest.mark.parametrize("law", [LiveBytes, PeakBytes])
@pytest.mark.parametrize(
    ("owns_nothing_of", "is_held"),
    [((), False), (("gain",), False), (("gain", "shift", "blocks.3.weight", "blocks.3.bias"), True)],
)
@pytest.mark.parametrize("kind", [MemoryKind.GATHERED, MemoryKind.GRADIENT])
def test_a_unit_of_which_a_rank_owns_nothing_may_be_missing_there(
    law: type[LiveBytes | PeakBytes], owns_nothing_of: tuple[str, ...], is_held: bool, kind: MemoryKind
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
        LiveBytes(kinds=(kind,), after=AfterPhase.FORWARD, expected=expected)
        if law is LiveBytes
        else PeakBytes(kinds=(kind,), phase=Phase.FORWARD, expected=expected)
    )
    evidence = _evidence(report)
    ranks = tuple(
        replace(rank, initial={**rank.initial, **{n: _emptied(rank.initial[n]) for n in owns_nothing_of}})
        for rank in evidence.ranks
    )
    assert judged.judge(replace(evidence, ranks=ranks)).record.held is (
        is_held and kind is MemoryKind.GATHERED
    )
    one = replace(evidence, ranks=(ranks[0], evidence.ranks[1]))
    record = judged.judge(one).record
    assert not record.held
    assert record.summary.startswith("rank 1" if is_held and kind is MemoryKind.GATHERED else "rank 0")


def _emptied(shard: Shard) -> Shard:
    return replace(shard, tensor=shard.tensor[:0])


def test_the_watch_must_cover_each_step() -> None:
    """The watch of the second rank begins late, or ends early: unseen steps prove nothing."""
    whole = LifetimeReport(
        num_events=40,
        num_collectives=1,
        lives=(_life(0, 1), _life(1, None, kind=MemoryKind.OPTIMIZER)),
        stretches=tuple(
            _stretch(10 * step + 5 * half, phase, step=step, microbatch=0 if half == 0 else -1)
            for step in range(4)
            for half, phase in enumerate((Phase.FORWARD, Phase.STEP))
        ),
    )
    kinds, nothing = (MemoryKind.GATHERED,), Exactly(0)
    cases: tuple[tuple[Law, Phase, str], ...] = (
        (
            LiveBytes(kinds=kinds, after=AfterPhase.FORWARD, expected=nothing),
            Phase.FORWARD,
            "rank 1, step 2: expected events in forward, got none",
        ),
        (
            LiveBytes(kinds=kinds, after=AfterPhase.STEP, expected=nothing),
            Phase.STEP,
            "rank 1, step 2: expected events in step, got none",
        ),
        (
            PeakBytes(phase=Phase.FORWARD, kinds=(MemoryKind.GATHERED,), expected=Between(0, 8)),
            Phase.FORWARD,
            "rank 1, step 2: expected events in forward, got none",
        ),
    )
    for law, missing, text in cases:
        evidence = _evidence(whole, steps=4)
        assert law.judge(evidence).record.held, law.judge(evidence).record
        cut = replace(whole, stretches=tuple(s for s in whole.stretches if (s.step, s.phase) != (2, missing)))
        first, second = evidence.ranks
        record = law.judge(replace(evidence, ranks=(first, replace(second, lifetime_report=cut)))).record
        assert not record.held
        assert record.summary == text


@pytest.mark.parametrize(
    ("name", "change", "is_held"),
    [("an input", "", True), ("an input", "it was resized", False), ("an output", "", False)],
)
def test_the_users_tensors_were_seen_and_let_alone(name: str, change: str, is_held: bool) -> None:
    tensors = (UserTensor(name=name, num_bytes=8, change=change),)
    law = UserTensorsLive(at_least=("an input",))
    assert _verdict(law, replace(REPORT, user_tensors=tensors))[0] is is_held
    others = (UserTensor(name="buffer 'x'", num_bytes=8), *tensors, UserTensor(name="an output", num_bytes=8))
    assert _verdict(law, replace(REPORT, user_tensors=others))[0] is is_held


def test_surplus_memory_is_reported_with_its_operator() -> None:
    report = _walk({"blocks.2": (3, 7)})
    other = replace(_life(3, 7, kind=MemoryKind.OTHER, unit="blocks.2"), operator="innocent")
    held, summary = _verdict(
        UnshardedOnlyInTurn(phase=Phase.FORWARD, ahead=0), replace(report, lives=(*report.lives, other))
    )
    assert not held
    assert (
        "expected no gathered memory of 'blocks.2' at this time, got 8 bytes of unit 'blocks.2' from op"
        in summary
    )
    assert "innocent" not in summary
    assert "bytes of unit 'blocks.0'" not in summary


def test_turns_of_modules_that_are_no_units_are_left_out() -> None:
    report = _walk({})
    inside = _stretch(15, Phase.FORWARD, unit="blocks.1.inner")
    between = _stretch(19, Phase.FORWARD)
    stretches = (*report.stretches[:2], inside, between, *report.stretches[2:])
    assert _verdict(UnshardedOnlyInTurn(phase=Phase.FORWARD), replace(report, stretches=stretches))[0]


def test_a_held_law_is_reported_with_its_range() -> None:
    report = _walk({"blocks.2": (3, 7)})
    peak = PeakBytes(kinds=(MemoryKind.GATHERED,), phase=Phase.FORWARD, expected=Between(0, 16))
    assert _verdict(peak, report) == (True, "16 bytes in 2 steps of ranks")
    left = LiveBytes(kinds=(MemoryKind.GATHERED,), after=AfterPhase.FORWARD, expected=Between(0, 8))
    assert _verdict(left, report) == (True, "0 bytes at 2 moments")
    first, second = _evidence(report).ranks
    longer = replace(report, lives=(*report.lives, _life(22, None)))
    differ = replace(_evidence(report), ranks=(first, replace(second, lifetime_report=longer)))
    assert left.judge(differ).record.summary == "0 to 8 bytes at 2 moments"
    turns = UnshardedOnlyInTurn(phase=Phase.FORWARD, ahead=2)
    assert _verdict(turns, report) == (True, "in 6 turns on 2 ranks")
