"""One engine judged on one case, as a session does it."""

from __future__ import annotations

import math
import time

from shardproof import Case, Cell, Law, MatchesOracle, RanksAgree, Refusal, TrialSession, WorldSpec
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.cases.training import Schedule, Training
from shardproof.harness.records.record import Record

LAWS: tuple[Law, ...] = (MatchesOracle(), RanksAgree())
TWO_STEPS = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=2))


def judged(
    session: TrialSession,
    engine: str,
    world: str = "threads:2",
    training: Training = TWO_STEPS,
    *,
    laws: tuple[Law, ...] = LAWS,
    refusal: Refusal = Refusal.WRONG,
    deadline_s: float = 30.0,
    within_s: float = math.inf,
) -> Record:
    """Judge an engine; fails where that takes longer than ``within_s``."""
    case = Case(id="case", training=training, laws=laws, refusal=refusal)
    cell = Cell(engine=engine, world=WorldSpec.parse(world, deadline_s=deadline_s))
    started = time.monotonic()
    record = session.run(case, cell, suite="", command="")
    assert time.monotonic() - started < within_s
    return record
