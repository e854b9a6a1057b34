"""Laws over the turns of units hold of events in the right order, and name what is whole or gathered too late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import Evidence, GathersGoFirst, Plan, Reshard, WholeInTurn
from shardproof.fixtures.chain import CHAIN
from shardproof.harness.tracing.events import EventKind, TraceEvent
from shardproof.harness.tracing.ledger import Entry, Op, Phase
from tests.laws.test_ledger_order import BYTES_OF
from tests.ledgers import entry, evidence, numbered

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
PLAN = Plan(units=CHAIN.units, reshard=Reshard.AFTER_FORWARD)
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
