"""What is gathered and reduced serves calls of units: the laws hold of an honest ledger, and see one call too many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof import (
    Accumulation,
    Capability,
    Eventful,
    Evidence,
    Fail,
    Interlude,
    Layout,
    Plan,
    Prefetch,
    Probe,
    Schedule,
    Training,
)
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.cases.units import groups_of
from shardproof.harness.laws.communication.needs import (
    CommunicatesAsNeeded,
    HeldBackIsSilent,
    ReducesAsAsked,
    laws_of_needs,
)
from shardproof.harness.tracing.events import EventKind, TraceEvent
from shardproof.harness.tracing.ledger import Entry, Op, Phase
from tests.ledgers import entry, evidence, numbered

HELD_BACK = Accumulation.LAST_MICROBATCH
PLAN = Plan(units=CHAIN.units, layout=Layout.SHARD, accumulation=HELD_BACK)
TRAINING = Training(problem=CHAIN, optimizer=SGD, plan=PLAN, schedule=Schedule(steps=1, microbatches=2))


def _honest(training: Training = TRAINING) -> list[Entry]:
    """Gather each group for forward and backward of each microbatch, and reduce it after the last."""
    entries = []
    for microbatch in range(2):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for group in groups_of(training):
                sent: dict[str, Any] = {
                    "phase": phase,
                    "microbatch": microbatch,
                    "num_bytes": group.padded_bytes(2),
                }
                entries.append(entry(Op.ALL_GATHER, unit=group.unit, **sent))
                if (phase, microbatch) == (Phase.BACKWARD, 1):
                    entries.append(entry(Op.REDUCE_SCATTER, unit=group.unit, **sent))
    return entries


def _evidence(entries: list[Entry], training: Training = TRAINING) -> Evidence:
    ledger = numbered(entries)
    given = evidence(ledger, ledger, steps=1, microbatches=2)
    events = tuple(
        TraceEvent(what=EventKind.BEGAN, at_ns=0, phase=phase, step=0, microbatch=microbatch)
        for microbatch in range(2)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return replace(given, training=training, ranks=tuple(replace(r, events=events) for r in given.ranks))


def test_both_laws_hold_of_an_engine_that_sends_what_is_needed() -> None:
    given = _evidence(_honest())
    assert all(law.judge(given).record.held for law in laws_of_needs(TRAINING))
    assert [type(law) for law in laws_of_needs(TRAINING)] == [CommunicatesAsNeeded, HeldBackIsSilent]


@pytest.mark.parametrize(
    ("op", "phase", "what"),
    [
        (Op.ALL_GATHER, Phase.FORWARD, "gathered, once for each call of a unit"),
        (Op.REDUCE_SCATTER, Phase.BACKWARD, "reduced, once for each backward through a unit"),
    ],
)
def test_sending_everything_once_more_is_too_much(op: Op, phase: Phase, what: str) -> None:
    again = [e for e in _honest() if (e.op, e.phase) == (op, phase)]
    record = CommunicatesAsNeeded().judge(_evidence([*_honest(), *again])).record
    assert f"bytes to be {what}, got" in record.summary


@pytest.mark.parametrize(("hinted", "is_right"), [("blocks.3", True), ("blocks.0", False)])
def test_backward_gathers_for_a_late_hint_too(hinted: str, is_right: bool) -> None:
    prefetch = Prefetch(backward=(("blocks.0", (hinted,)),))
    hints = replace(TRAINING, plan=replace(PLAN, prefetch=prefetch))
    gathers = [e for e in _honest() if (e.op, e.phase) == (Op.ALL_GATHER, Phase.BACKWARD)]
    again = [replace(e, unit="blocks.3") for e in gathers if e.unit == "blocks.3"]
    # What forward leaves out gives room in the sum of both phases alone.
    kept = [e for e in _honest() if (e.op, e.phase, e.microbatch) != (Op.ALL_GATHER, Phase.FORWARD, 1)]
    record = CommunicatesAsNeeded().judge(_evidence([*kept, *again], hints)).record
    assert record.held is is_right
    assert is_right or "gathered in backward, once for each recomputation" in record.summary


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.BROADCAST])
def test_an_update_exchanges_each_parameter_once(op: Op) -> None:
    of_forward = [e for e in _honest() if e.phase is Phase.FORWARD and not e.microbatch]
    once = [replace(e, op=op, phase=Phase.STEP) for e in of_forward]
    whole = replace(TRAINING, plan=replace(PLAN, layout=Layout.ZERO1))
    judged = [CommunicatesAsNeeded().judge(_evidence(sent, whole)).record for sent in (once, once * 3)]
    assert [record.held for record in judged] == [True, False]
    assert "bytes to be exchanged, once for each update, got" in judged[1].summary


def test_an_optimizer_gathers_only_what_it_takes_whole() -> None:
    again = [replace(e, phase=Phase.STEP) for e in _honest() if e.op is Op.ALL_GATHER]
    shapes = replace(TRAINING, plan=replace(PLAN, demands=frozenset({Capability.PARAMETER_SHAPES})))
    judged = [
        CommunicatesAsNeeded().judge(_evidence([*_honest(), *again], training)).record
        for training in (shapes, TRAINING)
    ]
    assert [record.held for record in judged] == [True, False]


def test_a_step_reduces_numbers_and_no_gradient_again() -> None:
    norm = entry(Op.ALL_REDUCE, phase=Phase.STEP, num_bytes=4)
    again = [replace(e, phase=Phase.STEP) for e in _honest() if e.op is Op.REDUCE_SCATTER]
    assert CommunicatesAsNeeded().judge(_evidence([*_honest(), *[norm] * 9])).record.held
    # An engine may reduce in the step alone.
    late = [e for e in _honest() if e.op is Op.ALL_GATHER] + again
    assert CommunicatesAsNeeded().judge(_evidence(late)).record.held
    record = CommunicatesAsNeeded().judge(_evidence([*_honest(), *again])).record
    assert "to be reduced, once for each backward through a unit, got" in record.summary


def test_buffers_are_sent_in_one_microbatch_of_a_step_alone() -> None:
    sent = [
        entry(Op.BROADCAST, phase=Phase.FORWARD, microbatch=microbatch, num_bytes=4) for microbatch in (0, 1)
    ]
    for once in sent:  # the first one may be left out
        assert HeldBackIsSilent().judge(_evidence([once, *_honest()])).record.held
    record = HeldBackIsSilent().judge(_evidence([*sent, *_honest()])).record
    assert "expected no broadcast after that in microbatch 0, got broadcast" in record.summary
    fails = replace(TRAINING, script=Eventful(moves=((Interlude.BEFORE, Fail()),)))
    assert HeldBackIsSilent().judge(_evidence([*sent, *_honest()], fails)).record.held


def test_each_repetition_reduces_once_what_it_holds_back() -> None:
    twice = replace(TRAINING, schedule=replace(TRAINING.schedule, repeats=2))
    one, again = _evidence(_honest(), twice), [e for e in _honest() if e.op is Op.REDUCE_SCATTER]
    both = _evidence([*_honest(), *again], twice)
    assert all(CommunicatesAsNeeded().judge(given).record.held for given in (one, both))
    assert (
        "to be reduced"
        in CommunicatesAsNeeded().judge(_evidence([*_honest(), *again, *again], twice)).record.summary
    )
    gathers = [e for e in _honest() if (e.op, e.phase) == (Op.ALL_GATHER, Phase.FORWARD)]
    assert not CommunicatesAsNeeded().judge(_evidence([*_honest(), *gathers], twice)).record.held


def test_a_unit_that_is_called_twice_may_reduce_twice_what_it_held_back() -> None:
    again = [e for e in _honest() if e.op is Op.REDUCE_SCATTER]
    given = _evidence([*_honest(), *again])
    entered = tuple(
        TraceEvent(
            what=EventKind.BACKWARD_ENTERED,
            at_ns=0,
            phase=Phase.BACKWARD,
            step=0,
            microbatch=1,
            unit=group.unit,
        )
        for group in groups_of(TRAINING)
    )
    assert not CommunicatesAsNeeded().judge(given).record.held
    twice = replace(given, ranks=tuple(replace(r, events=(*r.events, *entered * 2)) for r in given.ranks))
    assert CommunicatesAsNeeded().judge(twice).record.held


def test_a_reduction_before_the_last_microbatch_is_early() -> None:
    early = entry(Op.ALL_REDUCE, microbatch=0, num_bytes=4)
    record = HeldBackIsSilent().judge(_evidence([early, *_honest()])).record
    assert "expected no reduction before microbatch 1, got all_reduce" in record.summary
    flags = replace(early, dtype="int32")  # an engine's own
    assert HeldBackIsSilent().judge(_evidence([flags, *_honest()])).record.held


def test_loops_that_hold_nothing_back_are_not_held_to_silence() -> None:
    probing = replace(TRAINING, script=Eventful(moves=((Interlude.END, Probe.OF_INPUTS),)))
    every = replace(TRAINING, plan=replace(PLAN, accumulation=Accumulation.EVERY_MICROBATCH))
    for training in (probing, every):
        assert HeldBackIsSilent() not in laws_of_needs(training)


@pytest.mark.parametrize(("dtype", "is_held"), [("bfloat16", True), ("float32", False), ("int32", True)])
def test_real_gradients_are_reduced_in_the_dtype_asked_for(dtype: str, is_held: bool) -> None:
    asked = replace(TRAINING, plan=replace(PLAN, reduce_dtype=torch.bfloat16))
    assert ReducesAsAsked() in laws_of_needs(asked)
    sent = [replace(e, dtype=dtype) if e.op is Op.REDUCE_SCATTER else e for e in _honest()]
    record = ReducesAsAsked().judge(_evidence(sent, asked)).record
    assert record.held is is_held
    assert is_held or "expected bfloat16, got reduce_scatter" in record.summary
