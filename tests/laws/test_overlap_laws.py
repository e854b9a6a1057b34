"""One rank in one microbatch breaks the laws of overlap and of prefetch distance, as does an unwatched training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardproof import (
    Between,
    Evidence,
    Exactly,
    GathersGoFirst,
    Layout,
    Overlaps,
    OverlapsBackward,
    Plan,
    PrefetchDistance,
    Reshard,
    Select,
    Watch,
    WholeInTurn,
)
from shardproof.fixtures.chain import CHAIN
from shardproof.harness.laws.communication.order import Gathers, Order, Reduces, Reshards, Together
from shardproof.harness.tracing.events import EventKind, EventLog, TraceEvent
from shardproof.harness.tracing.ledger import Entry, Op, Phase
from tests.laws.test_ledger_order import BYTES_OF, chain_evidence
from tests.ledgers import entry, evidence, numbered

ROOT = ""
GATHERS = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,))
# W: the computing stream waits for the unit's gather. C, D: a unit begins to compute, and is done. F: it is freed.
AHEAD = ("G", "W", "C", "G3", "W3", "G2", "C3", "D3", "W2", "G1", "C2", "D2", "W1", "C1", "D1")
WAITS_AT_ONCE = ("G", "W", "C", "G3", "W3", "G2", "W2", "C3", "D3", "G1", "W1", "C2", "D2", "C1", "D1")
TOO_LATE = ("G", "W", "C", "G3", "W3", "C3", "D3", "G2", "W2", "G1", "C2", "D2", "W1", "C1", "D1")
TOO_FAR = ("G", "W", "C", "G3", "W3", "G2", "G1", "C3", "D3", "W2", "C2", "D2", "W1", "C1", "D1")
WRONG_ONE = ("G", "W", "C", "G3", "W3", "G1", "C3", "D3", "G2", "W2", "C2", "D2", "W1", "C1", "D1")


def chain(*order: str, phase: Phase = Phase.BACKWARD) -> tuple[tuple[Entry, ...], EventLog]:
    """Write two steps of a chain's backward, or forward, as a ledger and a course."""
    is_forward = phase is Phase.FORWARD
    entries: list[Entry] = []
    events: list[TraceEvent] = []
    for step in range(2):
        issued: dict[str, int] = {}
        for word in order:
            unit = f"blocks.{word[1:]}" if word[1:] else ROOT
            seq = None
            if word[0] in "GR":
                op = Op.ALL_GATHER if word[0] == "G" else Op.REDUCE_SCATTER
                issued[unit] = seq = len(entries)
                entries.append(entry(op, phase=phase, step=step, num_bytes=BYTES_OF[unit], unit=unit))
            what = {
                **dict.fromkeys("GR", EventKind.ISSUED),
                "W": EventKind.JOINED,
                "C": EventKind.COMPUTES if is_forward else EventKind.BACKWARD_STARTED,
                "D": EventKind.LEFT if is_forward else EventKind.BACKWARD_ENDED,
                "F": EventKind.RESHARDED,
            }[word[0]]
            if word[0] == "C":
                events.append(
                    _event(EventKind.ENTERED if is_forward else EventKind.BACKWARD_ENTERED, step, unit)
                )
            events.append(_event(what, step, unit, issued[unit] if word[0] == "W" else seq))
    return numbered(entries), tuple(replace(event, phase=phase) for event in events)


def _event(what: EventKind, step: int, unit: str, seq: int | None = None) -> TraceEvent:
    return TraceEvent(what=what, at_ns=1, phase=Phase.BACKWARD, step=step, microbatch=0, unit=unit, seq=seq)


def seen(*ranks: Sequence[str], phase: Phase = Phase.BACKWARD) -> Evidence:
    """Return the evidence of a watched training, rank by rank."""
    chains = [chain(*order, phase=phase) for order in ranks]
    plain = chain_evidence(*(ledger for ledger, _ in chains))
    event_logs = zip(plain.ranks, chains, strict=True)
    return replace(
        plain,
        training=replace(plain.training, watch=frozenset({Watch.RACES})),
        ranks=tuple(replace(o, events=events) for o, (_, events) in event_logs),
    )


def test_a_rank_may_wait_when_a_unit_is_done() -> None:
    record = Overlaps(select=GATHERS, but_for=(ROOT, "blocks.3")).judge(seen(AHEAD, AHEAD)).record
    assert record.held, record.summary
    assert record.summary.startswith("4 of 8 in flight")


@pytest.mark.parametrize("order", [WAITS_AT_ONCE, TOO_LATE])
def test_one_exposed_collective_of_one_rank_breaks_the_law(order: tuple[str, ...]) -> None:
    record = Overlaps(select=GATHERS, but_for=(ROOT, "blocks.3")).judge(seen(AHEAD, order)).record
    assert not record.held
    assert "rank 1 step 1" in record.summary
    assert "all_gather for blocks.2" in record.summary


def test_compute_of_the_root_hides_nothing() -> None:
    law = Overlaps(select=GATHERS, but_for=(ROOT,))
    beside_the_root = ("G", "W", "G3", "C", "D", "W3", "C3", "D3")
    record = law.judge(seen(beside_the_root, beside_the_root)).record
    assert "expected a unit to compute between the issue of all_gather for blocks.3" in record.summary


def test_a_collective_without_a_wait_is_in_flight_to_the_end() -> None:
    law = Overlaps(select=GATHERS, but_for=(ROOT, "blocks.3"))
    unawaited = tuple(word for word in AHEAD if word not in {"W2", "W1"})
    assert law.judge(seen(unawaited, unawaited)).record.held
    after_all = (*(word for word in unawaited if word != "G1"), "G1")
    assert "all_gather for blocks.1" in law.judge(seen(unawaited, after_all)).record.summary


def test_a_collective_that_no_unit_is_the_size_of_is_exposed_by_itself() -> None:
    evidence = seen(AHEAD, WAITS_AT_ONCE)
    first, second = evidence.ranks
    odd = tuple(
        replace(e, num_bytes=4) if e.step == 1 and e.num_bytes == BYTES_OF["blocks.2"] else e
        for e in second.ledger
    )
    record = (
        Overlaps(select=GATHERS, but_for=(ROOT, "blocks.3"))
        .judge(replace(evidence, ranks=(first, replace(second, ledger=odd))))
        .record
    )
    assert "all_gather for what no unit is the size of" in record.summary


def test_a_rank_without_the_selected_calls_breaks_the_law_and_a_world_of_one_does_not() -> None:
    law = Overlaps(select=GATHERS, but_for=(ROOT, "blocks.3"))
    reduces = tuple(word.replace("G", "R") for word in AHEAD)
    assert f"rank 1: expected {GATHERS}, got none" in law.judge(seen(AHEAD, reduces)).record.summary
    for alone in (law, PrefetchDistance(phase=Phase.BACKWARD, units=Exactly(1))):
        assert alone.judge(seen(WAITS_AT_ONCE)).record.held
        assert alone.judge(seen(())).record.held


def test_a_law_of_overlap_names_the_units_that_it_leaves_out() -> None:
    assert Overlaps(select=GATHERS).name == f"{GATHERS} overlaps compute"
    assert Overlaps(select=GATHERS, but_for=(ROOT, "a")).name.endswith("compute but for the root, a")


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_both_phases_are_recognised_by_their_own_marks(phase: Phase) -> None:
    law = PrefetchDistance(phase=phase, units=Exactly(1))
    assert law.judge(seen(AHEAD, AHEAD, phase=phase)).record.held
    assert not law.judge(seen(AHEAD, TOO_FAR, phase=phase)).record.held
    overlaps = Overlaps(select=replace(GATHERS, phases=(phase,)), but_for=(ROOT, "blocks.3"))
    assert overlaps.judge(seen(AHEAD, AHEAD, phase=phase)).record.held
    assert not overlaps.judge(seen(AHEAD, TOO_LATE, phase=phase)).record.held


def test_the_prefetch_distance_is_reported() -> None:
    law = PrefetchDistance(phase=Phase.BACKWARD, units=Between(0, 4))
    assert law.judge(seen(AHEAD, TOO_FAR)).record.summary.startswith("up to 2 ahead")
    assert law.judge(seen(TOO_FAR, AHEAD)).record.summary.startswith("up to 2 ahead")
    assert law.judge(seen(WAITS_AT_ONCE, WAITS_AT_ONCE)).record.summary.startswith("up to 1 ahead")


def test_unseen_overlap_proves_nothing() -> None:
    law = Overlaps(select=GATHERS, but_for=(ROOT, "blocks.3"))
    watched = seen(AHEAD, AHEAD)
    unwatched = replace(watched, training=replace(watched.training, watch=frozenset()))
    assert "expected a watch over streams" in law.judge(unwatched).record.summary
    blind = replace(watched, ranks=tuple(replace(o, events=()) for o in watched.ranks))
    assert "got no events" in law.judge(blind).record.summary
    idle = seen(AHEAD, [word for word in AHEAD if word[0] not in "CD"])
    assert not law.judge(idle).record.held
    silent = replace(watched, ranks=tuple(replace(o, ledger=()) for o in watched.ranks))
    assert not law.judge(silent).record.held


@pytest.mark.parametrize("units", [Exactly(1), Between(1, 2)])
def test_the_next_unit_is_gathered_ahead(units: Exactly | Between) -> None:
    record = PrefetchDistance(phase=Phase.BACKWARD, units=units).judge(seen(AHEAD, AHEAD)).record
    assert record.held, record.summary


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (TOO_LATE, "of blocks.2, blocks.1 to be gathered when blocks.3 computes, got none"),
        (TOO_FAR, "of blocks.2, blocks.1 to be gathered when blocks.3 computes, got blocks.2, blocks.1"),
        (WRONG_ONE, "of blocks.2, blocks.1 to be gathered when blocks.3 computes, got blocks.1"),
    ],
)
def test_too_few_too_many_and_the_wrong_one_break_the_law(order: tuple[str, ...], text: str) -> None:
    record = PrefetchDistance(phase=Phase.BACKWARD, units=Exactly(1)).judge(seen(AHEAD, order)).record
    assert not record.held
    assert text in record.summary
    assert "rank 1" in record.summary


def test_an_unseen_distance_proves_nothing() -> None:
    law = PrefetchDistance(phase=Phase.BACKWARD, units=Between(0, 4))
    assert not law.judge(seen(AHEAD, [word for word in AHEAD if word[0] != "C"])).record.held
    assert not law.judge(
        seen(AHEAD, [word for word in AHEAD if word in {"G", "W"} or word[0] in "CD"])
    ).record.held
    forward = replace(law, phase=Phase.FORWARD)
    assert not forward.judge(seen(AHEAD, AHEAD)).record.held


def test_frees_have_their_place_in_an_order() -> None:
    law = Order(
        select=Select(phases=(Phase.BACKWARD,)),
        events=(Gathers("blocks.3"), Reshards("blocks.3"), Reduces("blocks.3")),
    )
    honest = ("G3", "F3", "R3")
    assert law.judge(seen(honest, honest)).record.held
    assert (
        "expected free blocks.3 as #1, got reduce"
        in law.judge(seen(honest, ("G3", "R3", "F3"))).record.summary
    )
    assert "expected free blocks.3 as #1" in law.judge(seen(honest, ("G3", "R3"))).record.summary
    either = replace(
        law, events=(Gathers("blocks.3"), Together(frozenset({Reshards("blocks.3"), Reduces("blocks.3")})))
    )
    assert either.judge(seen(honest, ("G3", "R3", "F3"))).record.held
    assert not either.judge(seen(honest, ("G3", "R3"))).record.held
    assert not either.judge(seen(honest, ("R3", "G3", "F3"))).record.held


REDUCTIONS = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,))
# R: a unit's gradients are reduced.
IN_FLIGHT = ("C3", "D3", "R3", "C2", "D2", "R2", "W3", "W2")
BLOCKING = ("C3", "D3", "R3", "W3", "C2", "D2", "R2", "W2")


@pytest.mark.parametrize(("order", "is_expected"), [(IN_FLIGHT, True), (BLOCKING, False)])
def test_reductions_overlap_backward_or_do_not_as_expected(order: tuple[str, ...], is_expected: bool) -> None:
    other = BLOCKING if is_expected else IN_FLIGHT
    law = OverlapsBackward(select=REDUCTIONS, is_expected=is_expected)
    assert law.judge(seen(order, order)).record.held
    broken = law.judge(seen(order, other)).record
    assert not broken.held
    assert "rank 1 step 1" in broken.summary
    assert not law.judge(replace(seen(order), training=chain_evidence(()).training)).record.held


def test_overlap_of_nothing_is_not_seen() -> None:
    law = OverlapsBackward(select=REDUCTIONS, is_expected=False)
    assert not law.judge(seen(("C3", "D3"), ("C3", "D3"))).record.held


# Turns of units.


_KINDS = {
    "turn": EventKind.BACKWARD_ENTERED,
    "whole": EventKind.UNSHARDED,
    "compute": EventKind.BACKWARD_STARTED,
    "done": EventKind.BACKWARD_ENDED,
    "free": EventKind.RESHARDED,
    "gather": EventKind.ISSUED,
    "reduce": EventKind.ISSUED,
    "end": EventKind.ENDED,
}
_EVENT = TraceEvent(what=EventKind.BEGAN, at_ns=0, phase=Phase.BACKWARD, step=0, microbatch=0)
PLAN = Plan(layout=Layout.SHARD, units=CHAIN.units, reshard=Reshard.AFTER_FORWARD)
IN_TURN = (
    *("turn 3", "gather 3", "whole 3", "gather 2", "compute 3", "done 3", "free 3", "reduce 3"),
    *("turn 2", "whole 2", "gather 1", "compute 2", "done 2", "free 2", "reduce 2"),
    *("turn 1", "whole 1", "compute 1", "done 1", "free 1", "reduce 1", "end"),
)


def _without(*words: str) -> tuple[str, ...]:
    return tuple(word for word in IN_TURN if word not in words)


def _evidence(words: tuple[str, ...], plan: Plan = PLAN) -> Evidence:
    """Let both ranks have one backward of the chain with these events, of the blocks with these numbers."""
    entries: list[Entry] = []
    events: list[TraceEvent] = []
    for word in words:
        what, _, number = word.partition(" ")
        unit, seq = f"blocks.{number}" if number else None, None
        if what in {"gather", "reduce"} and unit is not None:
            seq = len(entries)
            op = Op.ALL_GATHER if what == "gather" else Op.REDUCE_SCATTER
            entries.append(entry(op, num_bytes=BYTES_OF[unit]))
        events.append(replace(_EVENT, what=_KINDS[what], unit=unit, seq=seq))
    ledger = numbered(entries)
    given = evidence(ledger, ledger, steps=1, microbatches=1)
    ranks = tuple(replace(rank, events=tuple(events)) for rank in given.ranks)
    return replace(given, ranks=ranks, training=replace(given.training, problem=CHAIN, plan=plan))


def test_both_laws_hold_of_units_in_turn() -> None:
    assert WholeInTurn().judge(_evidence(IN_TURN)).record.held
    assert GathersGoFirst().judge(_evidence(IN_TURN)).record.held


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (_without("free 3"), "while blocks.2 computes: expected sharded, got whole: blocks.3"),
        (_without("free 1"), "at the end: expected sharded, got whole: blocks.1"),
        (("whole 1", *_without("whole 1")), "while blocks.3 computes: expected sharded, got whole: blocks.1"),
        (_without("whole 3", "whole 2", "whole 1"), "expected some unit whole at some time, saw none"),
        (
            ("turn 3", "whole 3", "free 3", "whole 3", *IN_TURN[3:]),
            "backward while blocks.3 computes: expected whole until its turn ends, got gathered again",
        ),
    ],
)
def test_a_unit_out_of_turn_is_named(words: tuple[str, ...], text: str) -> None:
    record = WholeInTurn().judge(_evidence(words)).record
    assert not record.held
    assert text in record.summary


def test_the_policy_keeps_units_until_backward_is_over() -> None:
    kept = replace(PLAN, reshard=Reshard.KEEP)
    assert WholeInTurn().judge(_evidence((*_without("free 3", "end"), "free 3", "end"), kept)).record.held
    assert not WholeInTurn().judge(_evidence(_without("free 3"), kept)).record.held


def test_a_joint_unit_is_whole_until_its_last_module_is_done() -> None:
    units = ("blocks.0", "blocks.1", "blocks.2,blocks.3")
    evidence = _evidence(
        ("turn 3", "whole 3", "done 3", "turn 2", "compute 2", "done 2", "turn 1", "compute 1", "end"),
        replace(PLAN, units=units),
    )
    named = (
        replace(e, unit=units[2]) if e.what is EventKind.UNSHARDED else e for e in evidence.ranks[0].events
    )
    ranks = (replace(evidence.ranks[0], events=tuple(named)),)
    record = WholeInTurn().judge(replace(evidence, ranks=ranks)).record
    assert "while blocks.1 computes: expected sharded, got whole: blocks.2,blocks.3" in record.summary
    assert "while blocks.2 computes" not in " ".join(record.details)


def test_a_gather_after_the_reduction_before_it_is_named() -> None:
    late = [word for word in IN_TURN if word != "gather 1"]
    late.insert(late.index("turn 1") + 1, "gather 1")
    record = GathersGoFirst().judge(_evidence(tuple(late))).record
    assert not record.held
    assert "expected the gather of blocks.1 before the reduction" in record.summary
    late.insert(late.index("gather 2"), "gather 0")  # the unit that the engine expected next
    assert GathersGoFirst().judge(_evidence(tuple(late))).record.held
