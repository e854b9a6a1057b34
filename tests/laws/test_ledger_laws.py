"""An honest ledger keeps each law over ledgers; the law detects and reports a broken ledger of the last rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from shardproof import AllWaited, Bytes, Count, Dtype, InOrder, Law, Nothing, OnlyThese, ReduceOps
from shardproof.harness.cases.training import Schedule, Training
from shardproof.harness.laws.communication.bounds import Between, Exactly
from shardproof.harness.laws.communication.select import LoopStep, Microbatches, Per, Select, Window
from shardproof.harness.records.ledger_summary import summarize
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase, Wait
from tests.ledgers import (
    GATHERED_BYTES,
    UNITS,
    changed,
    entry,
    evidence,
    numbered,
    renew,
    sharding_ledger,
    without,
)

GATHERS_FORWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,))
GATHERS_BACKWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,))
REDUCTIONS = Select(ops=(Op.REDUCE_SCATTER,), microbatches=Microbatches.LAST)
EARLY_REDUCTIONS = Select(ops=(Op.REDUCE_SCATTER,), microbatches=Microbatches.ALL_BUT_LAST)
Break = Callable[[Ledger], Ledger]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumUnits:
    """A closed form, as suites write them."""

    name: str = "number of units"

    def __call__(self, training: Training, world_size: int) -> int:
        return len(training.plan.units)


def is_steady(op: Op, phase: Phase = Phase.BACKWARD) -> Callable[[Entry], bool]:
    return lambda e: e.op is op and e.phase is phase and e.step == 2


def with_extra(**fields: object) -> Break:
    extra = renew(entry(Op.ALL_REDUCE, step=2), **fields)
    return lambda ledger: numbered((*ledger, extra))


def lacking(op: Op, phase: Phase = Phase.BACKWARD) -> Break:
    return lambda ledger: without(ledger, is_steady(op, phase))


def altered(op: Op, **fields: object) -> Break:
    return lambda ledger: changed(ledger, is_steady(op), **fields)


def late_reduction(phase: Phase, step: int) -> Break:
    return altered(Op.REDUCE_SCATTER, wait=Wait(phase=phase, step=step, microbatch=-1))


def turned_around(ledger: Ledger) -> Ledger:
    last = max(i for i, e in enumerate(ledger) if is_steady(Op.ALL_GATHER, Phase.FORWARD)(e))
    return numbered((*ledger[:last], ledger[last + 1], ledger[last], *ledger[last + 2 :]))


def gathered_twice(ledger: Ledger) -> Ledger:
    last = [e for e in ledger if is_steady(Op.ALL_GATHER, Phase.FORWARD)(e) and e.step == ledger[-1].step]
    return numbered((*ledger, *last))


def only_prepare(ledger: Ledger) -> Ledger:
    return tuple(e for e in ledger if e.phase is Phase.PREPARE)


def empty(ledger: Ledger) -> Ledger:
    return ()


COUNT = Count(select=GATHERS_FORWARD, expected=Exactly(NumUnits()))
PER_STEP = Count(select=Select(ops=(Op.REDUCE_SCATTER,)), expected=Exactly(2), per=Per.STEP)
RANGE = Count(select=GATHERS_BACKWARD, expected=Between(1, NumUnits()))
BYTES = Bytes(select=GATHERS_FORWARD, expected=Exactly(2 * GATHERED_BYTES), minimum=GATHERED_BYTES)
NO_EARLY = Nothing(select=EARLY_REDUCTIONS)
ORDER = InOrder(
    selects=(
        Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,), units=("first",)),
        Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,), units=("second",)),
        GATHERS_BACKWARD,
        REDUCTIONS,
    )
)
ONLY = OnlyThese(selects=(GATHERS_FORWARD, GATHERS_BACKWARD, REDUCTIONS))
DTYPE = Dtype(select=REDUCTIONS, dtype="float32")
REDUCES = ReduceOps(select=REDUCTIONS, allowed=("avg", "premul_sum"))
WAITED = AllWaited(select=Select())

LAWS: tuple[Law, ...] = (COUNT, PER_STEP, RANGE, BYTES, NO_EARLY, ORDER, ONLY, DTYPE, REDUCES, WAITED)

BROKEN: tuple[tuple[Law, Break, str], ...] = (
    (
        COUNT,
        lacking(Op.ALL_GATHER, Phase.FORWARD),
        "expected 2 (number of units) collectives, got 1: all_gather(",
    ),
    (COUNT, with_extra(op=Op.ALL_GATHER, phase=Phase.FORWARD), "microbatch 0: expected 2"),
    (COUNT, altered(Op.ALL_GATHER, phase=Phase.FORWARD), "got 3"),
    (
        COUNT,
        with_extra(op=Op.ALL_GATHER, phase=Phase.FORWARD, unit="first"),
        "expected 2 (number of units) collectives, got 3, 2 of unit 'first': all_gather(",
    ),
    (COUNT, gathered_twice, "got 4, 2 of each unit: all_gather("),
    (COUNT, only_prepare, "got 0"),
    (
        COUNT,
        with_extra(op=Op.ALL_GATHER, phase=Phase.FORWARD, microbatch=-1),
        "none outside the microbatch counted",
    ),
    (PER_STEP, lacking(Op.REDUCE_SCATTER), "rank 1 step 2: expected 2 collectives, got 1"),
    (RANGE, with_extra(op=Op.ALL_GATHER), "expected 1 to 2 (number of units) collectives, got 3"),
    (BYTES, lacking(Op.ALL_GATHER, Phase.FORWARD), "expected 128 bytes, got 64"),
    (BYTES, with_extra(op=Op.ALL_GATHER, phase=Phase.FORWARD, num_bytes=1000), "17.625 x the theoretical"),
    (
        NO_EARLY,
        with_extra(op=Op.REDUCE_SCATTER),
        "rank 1 step 2 microbatch 0: expected none, got reduce_scatter(",
    ),
    (NO_EARLY, empty, "nothing was observed"),
    (ORDER, turned_around, "first, got it after"),
    (ORDER, only_prepare, "expected all_gather in forward of unit first, got none"),
    (ONLY, with_extra(), "rank 1 step 2 microbatch 0: left over all_reduce(avg, float32[4, 4])"),
    (ONLY, with_extra(op=Op.BARRIER, phase=Phase.STEP, microbatch=-1), "left over barrier"),
    (ONLY, empty, "nothing was observed"),
    (DTYPE, altered(Op.REDUCE_SCATTER, dtype="bfloat16"), "expected float32, got bfloat16"),
    (DTYPE, only_prepare, "rank 1: expected reduce_scatter on last microbatches, got none"),
    (REDUCES, altered(Op.REDUCE_SCATTER, reduce_op="sum"), "expected avg/premul_sum, got sum"),
    (WAITED, altered(Op.REDUCE_SCATTER, wait=None), "never waited for"),
    (WAITED, late_reduction(Phase.STEP, 2), "got one in step of step 2"),
    (WAITED, late_reduction(Phase.FORWARD, 3), "got one in forward of step 3"),
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_honest_ledger_keeps_the_law(law: Law, world_size: int) -> None:
    ledger = sharding_ledger(world_size=world_size)
    record = law.judge(evidence(*[ledger] * world_size)).record
    assert record.held, record.summary
    assert record.details == ()


@pytest.mark.parametrize(("law", "spoil", "text"), BROKEN)
def test_a_broken_ledger_of_the_last_rank_is_detected_and_reported(law: Law, spoil: Break, text: str) -> None:
    honest = sharding_ledger()
    record = law.judge(evidence(honest, spoil(honest))).record
    assert not record.held
    text_of_record = "\n".join((record.summary, *record.details))
    assert text in text_of_record, text_of_record
    assert "rank 1" in text_of_record
    assert "rank 0" not in text_of_record


def test_the_law_of_order_accepts_any_counts() -> None:
    short = lacking(Op.REDUCE_SCATTER)(sharding_ledger())
    assert ORDER.judge(evidence(short, short)).record.held
    assert not PER_STEP.judge(evidence(short, short)).record.held


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_schedule_without_steady_state_breaks_every_law(law: Law) -> None:
    ledger = sharding_ledger(steps=1)
    record = law.judge(evidence(ledger, ledger, steps=1)).record
    assert not record.held
    assert "1 step(s)" in record.summary


def test_forbidding_early_reductions_needs_an_early_microbatch() -> None:
    ledger = sharding_ledger(microbatches=1)
    record = NO_EARLY.judge(evidence(ledger, ledger, microbatches=1)).record
    assert not record.held
    assert "try a longer schedule" in record.summary


def test_forbidding_on_ledgers_of_no_training_is_blind() -> None:
    reads = numbered([entry(Op.ALL_GATHER, phase=Phase.OBSERVE, step=2)])
    record = Nothing(select=Select(ops=(Op.BARRIER,))).judge(evidence(reads, reads)).record
    assert not record.held
    assert "nothing was observed" in record.summary


def test_one_rank_need_not_communicate() -> None:
    silent = evidence(())
    assert Nothing(select=Select()).judge(silent).record.held
    assert DTYPE.judge(silent).record.held
    assert ORDER.judge(silent).record.held
    assert not COUNT.judge(silent).record.held  # the law still expects a number


def test_a_held_law_of_bytes_reports_their_ratio() -> None:
    ledger = sharding_ledger()
    summary = BYTES.judge(evidence(ledger, ledger)).record.summary
    assert "128 bytes per microbatch on every rank, 2.000 x the theoretical minimum of 64" in summary


def test_warm_up_may_differ_unless_asked_for() -> None:
    ledger = sharding_ledger()
    warm = numbered((*ledger, renew(entry(Op.ALL_GATHER), phase=Phase.FORWARD, step=0)))
    assert COUNT.judge(evidence(warm, warm)).record.held
    everywhere = Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,), window=Window.TRAINING)
    record = Count(select=everywhere, expected=Exactly(2)).judge(evidence(warm, warm)).record
    assert "rank 0 step 0 microbatch 0: expected 2 collectives, got 3" in record.details[0]


def test_prepare_is_counted_when_asked_for() -> None:
    ledger = sharding_ledger()
    select = Select(ops=(Op.BROADCAST,), phases=(Phase.PREPARE,), steps=(-1,))
    one = Count(select=select, expected=Exactly(1), per=Per.STEP)
    assert one.judge(evidence(ledger, ledger)).record.held
    two = Count(select=select, expected=Exactly(2), per=Per.STEP)
    assert "before step 0: expected 2" in two.judge(evidence(ledger, ledger)).record.summary


def test_a_wait_within_the_optimizer_phase_serves_calls_issued_there() -> None:
    clip = renew(entry(Op.ALL_REDUCE), phase=Phase.STEP, step=2, microbatch=-1)
    ledger = numbered((*sharding_ledger(), clip))
    assert WAITED.judge(evidence(ledger, ledger)).record.held


def test_long_failures_are_cut_and_report_the_cut() -> None:
    ledger = sharding_ledger(steps=40)
    record = Nothing(select=GATHERS_FORWARD).judge(evidence(ledger, ledger, steps=40)).record
    assert len(record.details) == 25
    assert record.details[-1] == f"and {39 * 2 * 2 * 2 - 24} more"


SELECTIONS: tuple[tuple[Select, set[int]], ...] = (
    (Select(), {1, 2, 3, 4, 5}),
    (Select(ops=(Op.ALL_REDUCE, Op.BARRIER)), {1, 5}),
    (Select(phases=(Phase.OBSERVE,)), {6}),
    (Select(axis="shard"), {2}),
    (Select(group_size=4), {3}),
    (Select(units=(None,)), {1, 2, 3, 5}),
    (Select(units=("first",)), {4}),
    (Select(window=Window.TRAINING), {0, 1, 2, 3, 4, 5}),
    (Select(window=Window.EVERYTHING), {0, 1, 2, 3, 4, 5, 7}),
    (Select(steps=(0,)), {0}),
    (Select(microbatches=Microbatches.LAST), {3, 4}),
    (Select(microbatches=Microbatches.ALL_BUT_LAST), {1, 2}),
    (Select(microbatches=(0, 7)), {1, 2}),
    (Select(dtypes=("bfloat16", "int64")), {3, 5}),
)


@pytest.mark.parametrize(("select", "picked"), SELECTIONS, ids=lambda value: str(value))
def test_each_field_narrows(select: Select, picked: set[int]) -> None:
    ledger = numbered(
        [
            renew(entry(), step=0),
            renew(entry(), step=1),
            renew(entry(Op.REDUCE_SCATTER), step=1, axis="shard"),
            renew(entry(Op.BROADCAST, world_size=4), step=2, microbatch=2, dtype="bfloat16"),
            renew(entry(Op.ALL_GATHER), step=1, microbatch=2, unit="first"),
            renew(entry(Op.BARRIER), step=2, phase=Phase.STEP, microbatch=-1, dtype="int64"),
            renew(entry(Op.ALL_GATHER), step=2, phase=Phase.OBSERVE, microbatch=-1),
            renew(entry(Op.BROADCAST), step=-1, phase=Phase.PREPARE, microbatch=-1),
        ]
    )
    assert {e.seq for e in select.pick(ledger, Schedule(steps=3, microbatches=3))} == picked


def test_moments_follow_the_schedule() -> None:
    schedule = Schedule(steps=3, microbatches=2)
    assert Select().moments(schedule, Per.STEP) == (LoopStep(step=1), LoopStep(step=2))
    assert Select(microbatches=Microbatches.LAST, steps=(2,)).moments(schedule, Per.MICROBATCH) == (
        LoopStep(step=2, microbatch=1),
    )
    assert Select(steps=(7,)).moments(schedule, Per.STEP) == ()
    listed = Select(microbatches=(1, 2), steps=(1,))
    assert listed.moments(schedule, Per.MICROBATCH) == (LoopStep(step=1, microbatch=1),)


@pytest.mark.parametrize(
    ("select", "name"),
    [
        (Select(), "any collective"),
        (Select(ops=(Op.SEND, Op.RECV), phases=(Phase.FORWARD,)), "send/recv in forward"),
        (Select(dtypes=("int64",), axis="shard", group_size=2), "any collective of int64 on axis shard in groups of 2"),
        (Select(units=("a", None), steps=(1, 2)), "any collective of unit a/None at steps [1, 2]"),
        (Select(window=Window.TRAINING), "any collective over every step"),
        (Select(microbatches=Microbatches.LAST), "any collective on last microbatches"),
        (Select(microbatches=(0, 2)), "any collective on microbatches [0, 2]"),
    ],
)  # fmt: skip
def test_a_selection_is_spelt(select: Select, name: str) -> None:
    assert str(select) == name


def test_selections_that_share_no_microbatch_have_no_order() -> None:
    first, last = replace(REDUCTIONS, microbatches=(0,)), replace(REDUCTIONS, microbatches=(1,))
    ledger = sharding_ledger()
    record = InOrder(selects=(first, last)).judge(evidence(ledger, ledger)).record
    assert record.summary == "expected a microbatch that all selections cover, got none"


def test_a_selection_refuses_fields_that_never_match() -> None:
    with pytest.raises(TypeError, match="expected a tuple"):
        Select(ops=Op.ALL_REDUCE)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match=r"window=Window\.EVERYTHING"):
        Select(phases=(Phase.PREPARE,))


def test_the_summary_adds_up_and_lists_only_ranks_that_differ() -> None:
    honest = sharding_ledger()
    odd = numbered((*honest, renew(entry(Op.ALL_REDUCE), axis=None, dtype="bfloat16")))
    lines = summarize({0: honest, 1: honest, 2: odd, 3: ()})
    assert {line.rank for line in lines} == {0, 2, 3}
    for rank, ledger in ((0, honest), (2, odd)):
        lines_of_rank = [line for line in lines if line.rank == rank]
        assert sum(line.count for line in lines_of_rank) == len(ledger)
        assert sum(line.num_bytes for line in lines_of_rank) == sum(e.num_bytes for e in ledger)
    gathers = next(line for line in lines if line.op == "all_gather" and line.phase == "forward")
    assert (gathers.count, gathers.num_bytes) == (len(UNITS) * 6, len(UNITS) * 6 * GATHERED_BYTES)
    assert any(line.axis == "2 ranks" and line.dtype == "bfloat16" for line in lines)
    assert [line.count for line in lines if line.rank == 3] == [0]


def test_the_summary_lists_a_rank_that_differs_in_bytes_alone() -> None:
    honest = sharding_ledger()
    heavy = changed(honest, is_steady(Op.ALL_GATHER), num_bytes=1)
    assert {line.rank for line in summarize({0: honest, 1: heavy})} == {0, 1}
