"""A failing law over buffers names the unit of the collective's size, padded or not, and never guesses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import Evidence, Plan, Schedule, Training
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.heads import TWO_HEADS
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import ModelProblem
from shardproof.harness.laws.communication.buffers import LeavesBuffersAlone, ResultsAreWaitedFor, harm_in
from shardproof.harness.tracing.ledger import BufferViolation, Ledger, Op, Phase, ViolationKind
from tests.ledgers import entry, evidence, numbered

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
