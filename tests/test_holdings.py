"""Each rank may hold of a parameter what the plan's layout says: no more where it is sharded, all where it is not."""

from __future__ import annotations

from functools import cache

import pytest

from engine.contract import Layout, Plan, Replicas
from fixtures.optimizers import SGD
from fixtures.problems import MLP_UNEVEN
from harness.case import Schedule, Training
from harness.holdings import HoldsItsShare
from harness.law import Evidence, Ruling
from harness.oracle import OracleObservation, run_oracle
from tests.simulated_engine import simulate

WORLD_SIZE = 4
PLANS = {
    "replicate": Plan(layout=Layout.REPLICATE),
    "shard": Plan(layout=Layout.SHARD),
    **{r.name.lower(): Plan(layout=Layout.HYBRID, replicas=r) for r in Replicas},
}
# How many shares each plan means on four ranks, and how each simulated layout really lies there.
SHARES = {"replicate": 1, "shard": 4, "one": 4, "two": 2, "pairs": 2, "singles": 1}
HELD = {Layout.REPLICATE: 1, Layout.HYBRID: 2, Layout.SHARD: 4}


@cache
def _oracle() -> OracleObservation:
    return run_oracle(_training(Plan()), WORLD_SIZE)


def _training(plan: Plan) -> Training:
    return Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=1))


def _ruling(plan: Plan, held: Layout) -> Ruling:
    ranks = simulate(_training(plan), WORLD_SIZE, layout=held)
    evidence = Evidence(training=_training(plan), world_size=WORLD_SIZE, ranks=ranks, oracle=_oracle())
    return HoldsItsShare().judge(evidence)


@pytest.mark.parametrize("held", HELD, ids=lambda x: f"held as {x.name}")
@pytest.mark.parametrize("asked", PLANS)
def test_holds_for_the_share_that_the_plan_means(asked: str, held: Layout) -> None:
    # A smaller share than asked for is no sin, but where the whole is asked for nothing less will do.
    is_right = HELD[held] == 1 if SHARES[asked] == 1 else HELD[held] >= SHARES[asked]
    record = _ruling(PLANS[asked], held).record
    assert record.held is is_right
    assert (f"1/{SHARES[asked]} of" in record.summary) or (record.held and "whole" in record.summary)


def test_a_plan_without_a_layout_is_no_question() -> None:
    with pytest.raises(ValueError, match=r"expected a plan that names a layout, got Layout\.NATIVE"):
        _ruling(Plan(), Layout.SHARD)
