"""The laws of order, bounds and waiting report calls that are early, late, too many, or without a wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardproof import Asynchronous, AtMostInFlight, Evidence, Plan, Schedule, Select, Training
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.heads import TWO_HEADS
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import EXACT_LINEAR, ModelProblem
from shardproof.harness.laws.communication.buffers import LeavesBuffersAlone, ResultsAreWaitedFor, harm_in
from shardproof.harness.laws.communication.order import Computes, Gathers, Order, Reduces, Reshards, Together
from shardproof.harness.records.observation import Observation
from shardproof.harness.tracing.events import EventKind, TraceEvent
from shardproof.harness.tracing.ledger import BufferViolation, Ledger, Op, Phase, ViolationKind, Wait
from tests.ledgers import changed, entry, evidence, numbered, sharding_ledger

BYTES_OF = {"": 18 * 4, "blocks.0": 108 * 4, "blocks.1": 520 * 4, "blocks.2": 820 * 4, "blocks.3": 210 * 4}
IN_TURN = Order(
    select=Select(),
    events=(Gathers("blocks.3"), Gathers("blocks.2", "blocks.3"), Reduces("blocks.3"), Reduces("")),
)
OUT_OF_TURN: tuple[tuple[tuple[str, ...], str], ...] = (
    (("G3", "R3", "G2", "R"), "expected gather blocks.2 during blocks.3 as #1, got reduce blocks.3"),
    (("G3", "G1", "R3", "R"), "got gather blocks.1 during blocks.3"),
    (("G3", "G2", "R3"), "expected reduce the root as #3, got no more"),
    (("G3", "G2", "R3", "R", "R"), "expected no more as #4, got reduce the root"),
)


def chain_ledger(*order: str, world_size: int = 2) -> Ledger:
    """Write one step's backward of a chain: ``G`` gathers, ``R`` reduces, ``C`` computes the unit of that number."""
    entries = []
    for step in range(2):
        for word in order:
            unit = "" if word[1:] == "" else f"blocks.{word[1:]}"
            op = {"G": Op.ALL_GATHER, "R": Op.REDUCE_SCATTER, "C": Op.BROADCAST}[word[0]]
            during = unit if op is Op.BROADCAST else "blocks.3"
            made = entry(op, world_size=world_size, step=step, num_bytes=BYTES_OF[unit], unit=during)
            entries.append(made)
    return numbered(entries)


def chain_evidence(*ledgers: Ledger) -> Evidence:
    plan = Plan(units=CHAIN.units)
    plain = evidence(*ledgers, steps=2, microbatches=1)
    return replace(plain, training=replace(plain.training, problem=CHAIN, plan=plan))


def test_order_of_units_is_recognised_by_size() -> None:
    ledger = chain_ledger("G3", "G2", "R3", "R")
    assert IN_TURN.judge(chain_evidence(ledger, ledger)).record.held
    gathers = replace(IN_TURN, events=IN_TURN.events[:2])
    assert gathers.judge(chain_evidence(ledger, ledger)).record.held  # reductions are left out of account


@pytest.mark.parametrize(("order", "text"), OUT_OF_TURN)
def test_order_of_units_is_broken_by_one_rank(order: tuple[str, ...], text: str) -> None:
    honest = chain_ledger("G3", "G2", "R3", "R")
    record = IN_TURN.judge(chain_evidence(honest, chain_ledger(*order))).record
    assert not record.held
    assert text in record.summary
    assert "rank 1" in record.summary


def test_order_of_units_depends_on_the_turn_and_on_the_parameters_of_a_call() -> None:
    honest = chain_ledger("G3", "G2", "R3", "R")
    late = changed(honest, lambda e: e.step == 1 and e.seq % 4 == 1, unit="blocks.2")
    assert "during blocks.2" in IN_TURN.judge(chain_evidence(honest, late)).record.summary
    odd = changed(honest, lambda e: e.step == 1 and e.seq % 4 == 2, num_bytes=4)
    assert "of 4 bytes, which no unit has" in IN_TURN.judge(chain_evidence(honest, odd)).record.summary


def test_order_of_units_of_one_size_proves_nothing() -> None:
    ledger = sharding_ledger(microbatches=1)
    plain = evidence(ledger, ledger, microbatches=1)
    plan = Plan(units=EXACT_LINEAR.units)
    twins = replace(plain, training=replace(plain.training, problem=EXACT_LINEAR, plan=plan))
    record = Order(select=Select(), events=(Gathers("left"),)).judge(twins).record
    assert "which 2 ranks cannot distinguish" in record.summary


def test_order_of_computation_is_recognised_by_broadcasts_of_modules() -> None:
    before = replace(IN_TURN, events=(Gathers("blocks.2"), Computes("blocks.3"), Reduces("blocks.3")))
    early, late = chain_ledger("G2", "C3", "R3"), chain_ledger("C3", "G2", "R3")
    assert before.judge(chain_evidence(early, early)).record.held
    record = before.judge(chain_evidence(early, late)).record
    assert "expected gather blocks.2 as #0, got compute gradients of blocks.3" in record.summary
    without_broadcasts = replace(IN_TURN, events=(Gathers("blocks.2"), Reduces("blocks.3")))
    assert without_broadcasts.judge(
        chain_evidence(early, late)
    ).record.held  # broadcasts are left out of account


ANY_ORDER = replace(
    IN_TURN,
    events=(
        Gathers("blocks.3"),
        Together(frozenset({Gathers("blocks.2"), Reduces("blocks.3")})),
        Together(frozenset({Gathers("blocks.1"), Reduces("blocks.2")})),
        Reduces(""),
    ),
)


@pytest.mark.parametrize("first", [("G2", "R3"), ("R3", "G2")])
@pytest.mark.parametrize("second", [("G1", "R2"), ("R2", "G1")])
def test_simultaneous_events_may_come_in_any_order(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    ledger = chain_ledger("G3", *first, *second, "R")
    assert ANY_ORDER.judge(chain_evidence(ledger, ledger)).record.held


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (("G3", "G2", "R2", "G1", "R3", "R"), "expected reduce blocks.3 as #2, got reduce blocks.2"),
        (("G2", "R3", "G3", "G1", "R2", "R"), "expected gather blocks.3 as #0, got gather blocks.2"),
        (("G3", "R3", "R3", "G1", "R2", "R"), "expected gather blocks.2 as #2, got reduce blocks.3"),
        (("G3", "G2", "R3", "G1", "R", "R2"), "expected reduce blocks.2 as #4, got reduce the root"),
        (("G3", "G2"), "expected reduce blocks.3 as #2, got no more; in all gather blocks.3"),
        ((), "expected gather blocks.3 as #0, got no more; in all nothing"),
    ],
)
def test_simultaneous_events_have_no_other_event_in_between(order: tuple[str, ...], text: str) -> None:
    honest = chain_ledger("G3", "G2", "R3", "G1", "R2", "R")
    # Reads leave traces in any step, so that no rank is silent.
    other = numbered((*chain_ledger(*order), entry(Op.BARRIER, step=0)))
    record = ANY_ORDER.judge(chain_evidence(honest, other)).record
    assert not record.held
    assert text in record.summary


def with_frees(ledger: Ledger, frees: Mapping[int, str], phase: Phase = Phase.BACKWARD) -> Observation:
    """Return the evidence of rank 1: in each step the units of ``frees`` are freed after so many calls."""
    events = []
    for step in range(2):
        calls = [call for call in ledger if call.step == step]
        for index in range(len(calls) + 1):
            if index in frees:
                events.append(_event(EventKind.RESHARDED, step, phase, unit=frees[index]))
            if index < len(calls):
                events.append(_event(EventKind.ISSUED, step, calls[index].phase, seq=calls[index].seq))
        events += [_event(EventKind.WAITED, step, call.phase, seq=call.seq) for call in calls]
    _, observation = chain_evidence(ledger, ledger).ranks
    return replace(observation, events=tuple(events))


def _event(
    what: EventKind, step: int, phase: Phase, *, unit: str | None = None, seq: int | None = None
) -> TraceEvent:
    return TraceEvent(what=what, at_ns=0, phase=phase, step=step, microbatch=0, unit=unit, seq=seq)


FREED = replace(
    IN_TURN,
    select=Select(phases=(Phase.BACKWARD,)),
    events=(Gathers("blocks.3"), Reshards("blocks.3"), Reduces("blocks.3"), Reshards("")),
)


def judged(observation: Observation) -> tuple[bool, str]:
    honest = with_frees(chain_ledger("G3", "R3"), {1: "blocks.3", 2: ""})
    plain = chain_evidence(honest.ledger, observation.ledger)
    record = FREED.judge(replace(plain, ranks=(replace(honest, rank=0), observation))).record
    return record.held, record.summary


def test_frees_are_in_order_with_calls() -> None:
    ledger = chain_ledger("G3", "R3")
    assert judged(with_frees(ledger, {1: "blocks.3", 2: ""}))[0]
    for frees, text in (
        ({2: "blocks.3"}, "rank 1 step 1 microbatch 0: expected free blocks.3 as #1, got reduce blocks.3"),
        ({1: "blocks.3"}, "expected free the root as #3, got no more"),
        ({1: "blocks.2", 2: ""}, "expected free blocks.3 as #1, got free blocks.2"),
        ({0: "", 1: "blocks.3", 2: ""}, "expected gather blocks.3 as #0, got free the root"),
        ({}, "expected free blocks.3 as #1, got reduce blocks.3"),
    ):
        held, summary = judged(with_frees(ledger, frees))
        assert not held
        assert text in summary


def test_frees_of_other_phases_are_left_out_of_account() -> None:
    ledger = chain_ledger("G3", "R3")
    backward, forward = (
        with_frees(ledger, {1: "blocks.3", 2: ""}),
        with_frees(ledger, {0: ""}, phase=Phase.FORWARD),
    )
    frees = [event for event in forward.events if event.what is EventKind.RESHARDED]
    assert judged(replace(backward, events=(*frees, *backward.events)))[0]
    assert not judged(replace(backward, events=tuple(_in(Phase.FORWARD, m) for m in backward.events)))[0]
    everywhere = replace(FREED, select=Select())
    plain = chain_evidence(ledger, ledger)
    ranks = tuple(replace(backward, rank=rank, events=(*frees, *backward.events)) for rank in range(2))
    assert "got free the root" in everywhere.judge(replace(plain, ranks=ranks)).record.summary


def _in(phase: Phase, event: TraceEvent) -> TraceEvent:
    return replace(event, phase=phase) if event.what is EventKind.RESHARDED else event


def test_one_rank_alone_need_not_communicate() -> None:
    assert IN_TURN.judge(chain_evidence(())).record.held


def test_order_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected some event"):
        Order(select=Select(), events=())


def reductions(*issued_at_wait: int | None) -> Ledger:
    """Write reductions of one step, each with a wait after the given number of issued calls."""
    entries = numbered([entry(Op.REDUCE_SCATTER, step=1) for _ in issued_at_wait])
    waits = [Wait(phase=Phase.BACKWARD, step=1, microbatch=0, num_issued=n) for n in issued_at_wait]
    return tuple(replace(e, wait=w) for e, w in zip(entries, waits, strict=True))


def test_reductions_in_flight_are_counted_until_waited_for() -> None:
    two = AtMostInFlight(select=Select(), at_most=2)
    bounded = reductions(2, 3, 3)
    assert two.judge(evidence(bounded, bounded, steps=2, microbatches=1)).record.held
    for ledger, count in ((reductions(3, 3, 3), 3), (reductions(None, 2, 3), 2)):
        one = AtMostInFlight(select=Select(), at_most=count - 1)
        record = one.judge(evidence(bounded if count == 3 else reductions(1, 2, 3), ledger, steps=2)).record
        assert not record.held
        assert f"expected at most {count - 1} in flight, got {count}" in record.summary
    assert not two.judge(evidence((), (), steps=2, microbatches=1)).record.held


def test_calls_that_block_are_not_asynchronous() -> None:
    law = Asynchronous(select=Select())
    blocking = sharding_ledger()
    swift = tuple(replace(e, is_async=True) for e in blocking)
    assert law.judge(evidence(swift, swift)).record.held
    assert "got one that blocks" in law.judge(evidence(swift, blocking)).record.summary


# Buffers.


# Of the second block: 40 rows of 12 and 40 more elements, of which 3 ranks make 42 each.
EXACT_BYTES, PADDED_BYTES = 4 * (40 * 12 + 40), 4 * (42 * 12 + 42)
HEAD_BYTES = 4 * (5 * 16 + 5)


def _evidence(*ledgers: Ledger, problem: ModelProblem = CHAIN) -> Evidence:
    training = Training(
        problem=problem, optimizer=SGD, plan=Plan(units=problem.units), schedule=Schedule(steps=1)
    )
    return replace(evidence(*ledgers, steps=1), training=training)


def _summary(problem: ModelProblem, num_bytes: int, unit: str | None = None) -> str:
    lost = entry(Op.ALL_GATHER, world_size=3, is_async=True, wait=None, num_bytes=num_bytes, unit=unit)
    record = ResultsAreWaitedFor().judge(_evidence(*[numbered([lost])] * 3, problem=problem)).record
    assert not record.held
    return record.summary


@pytest.mark.parametrize("num_bytes", [EXACT_BYTES, PADDED_BYTES])
def test_a_unit_is_named_by_its_size(num_bytes: int) -> None:
    summary = _summary(CHAIN, num_bytes, unit="")
    named = " in backward of the root, of the size of blocks.1: blocks.1.weight, blocks.1.bias"
    assert f"{named} (and 2 more)" in summary


@pytest.mark.parametrize(("problem", "num_bytes"), [(TWO_HEADS, HEAD_BYTES), (CHAIN, PADDED_BYTES + 32)])
def test_no_unit_is_named_where_two_or_none_are_of_that_size(problem: ModelProblem, num_bytes: int) -> None:
    assert "of the size of" not in _summary(problem, num_bytes)


def test_each_asynchronous_result_of_each_rank_is_waited_for() -> None:
    waited, blocking = entry(Op.ALL_GATHER, is_async=True), entry(Op.ALL_REDUCE, is_async=False, wait=None)
    lost = entry(Op.REDUCE_SCATTER, is_async=True, wait=None, step=1)
    honest = numbered([waited, blocking, waited])
    record = ResultsAreWaitedFor().judge(_evidence(honest, honest)).record
    assert record.held
    assert record.summary == "all 4 asynchronous ones"
    record = ResultsAreWaitedFor().judge(_evidence(honest, numbered([waited, blocking, lost]))).record
    assert not record.held
    assert record.summary.startswith("rank 1, step 1 microbatch 0: no wait for reduce_scatter(")
    assert "more)" not in record.summary


@pytest.mark.parametrize("kind", ViolationKind)
def test_each_harm_on_each_rank_is_reported(kind: ViolationKind) -> None:
    called = entry(Op.ALL_GATHER, is_async=True, unit="blocks.1")
    harm = BufferViolation(
        kind=kind, phase=Phase.BACKWARD, step=0, microbatch=0, unit=None, site="engine.py:7 in step"
    )
    harmed = replace(called, harms=(harm,))
    honest, other = numbered([called, called]), numbered([called, harmed])
    record = LeavesBuffersAlone().judge(_evidence(honest, honest)).record
    assert record.held
    assert record.summary == "by 4 asynchronous collectives"
    description = f"{kind} before the wait at engine.py:7 in step: all_gather("
    record = LeavesBuffersAlone().judge(_evidence(honest, other)).record
    assert not record.held
    assert f"rank 1, step 0 microbatch 0: {description}" in record.summary
    assert harm_in([honest, honest]) is None
    found = harm_in([honest, other])
    assert found is not None
    assert description in found
    assert found.endswith(" in backward of blocks.1")
