"""Where a law over buffers fails it names the unit of the collective's size, padded or not, and never guesses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract import Plan
from fixtures.chain import CHAIN
from fixtures.heads import TWO_HEADS
from fixtures.optimizers import SGD
from fixtures.problems import ModelProblem
from harness.case import Schedule, Training
from harness.ledger.buffers import ResultsAreWaitedFor
from harness.ledger.entry import Op
from tests.ledgers import entry, evidence, numbered

# Of the second block: 40 rows of 12 and 40 more elements, of which 3 ranks make 42 each.
EXACT_BYTES, PADDED_BYTES = 4 * (40 * 12 + 40), 4 * (42 * 12 + 42)
HEAD_BYTES = 4 * (5 * 16 + 5)


def _summary(problem: ModelProblem, num_bytes: int, unit: str | None = None) -> str:
    lost = entry(Op.ALL_GATHER, world_size=3, is_async=True, wait=None, num_bytes=num_bytes, unit=unit)
    training = Training(
        problem=problem, optimizer=SGD, plan=Plan(units=problem.units), schedule=Schedule(steps=1)
    )
    ledgers = [numbered([lost])] * 3
    record = ResultsAreWaitedFor().judge(replace(evidence(*ledgers, steps=1), training=training)).record
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
