"""Every row of a parameter must move, whether ranks show blocks of rows or intervals of the flattened parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from shardproof import EveryRowMoves, Ruling, Schedule, Shard, Training
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.harness.records.observation import Observation
from tests.laws.flat_pieces import flattened
from tests.simulated_engine import evidence_of, simulate

WORLD_SIZE = 3
PARAMETER = "layers.1.weight"
TRAINING = Training(problem=MLP_UNEVEN, optimizer=SGD, schedule=Schedule(steps=2))
FORMS = {"blocks": lambda observation: observation, "flat": flattened}
any_form = pytest.mark.parametrize("form", FORMS)


@cache
def _ranks() -> tuple[Observation, ...]:
    return simulate(TRAINING, WORLD_SIZE)


def _ruling(
    form: str, broken: Callable[[Observation], Observation] = lambda o: o, parameter: str = PARAMETER
) -> Ruling:
    ranks = tuple(FORMS[form](broken(observation)) for observation in _ranks())
    return EveryRowMoves(parameter=parameter).judge(evidence_of(TRAINING, WORLD_SIZE, ranks=ranks))


def _with_a_still_row(observation: Observation) -> Observation:
    """Let the last rank's last row keep its initial values."""
    if observation.rank != WORLD_SIZE - 1:
        return observation
    last = observation.steps[-1]
    shard = last.parameters[PARAMETER]
    tensor = shard.tensor.clone()
    tensor[-1] = observation.initial[PARAMETER].tensor[-1]
    parameters: dict[str, Shard] = {**last.parameters, PARAMETER: replace(shard, tensor=tensor)}
    return replace(observation, steps=(*observation.steps[:-1], replace(last, parameters=parameters)))


@any_form
def test_training_moves_every_row(form: str) -> None:
    assert _ruling(form).record.held


@any_form
def test_a_row_that_stays_is_named(form: str) -> None:
    num_rows = _ranks()[0].initial[PARAMETER].global_shape[0]
    ruling = _ruling(form, _with_a_still_row)
    assert not ruling.record.held
    assert f"rank {WORLD_SIZE - 1}: row(s) [{num_rows - 1}]" in ruling.record.summary


@any_form
def test_a_parameter_that_no_rank_holds_breaks_the_law(form: str) -> None:
    ruling = _ruling(form, parameter="no.such")
    assert not ruling.record.held
    assert "no rank holds any" in ruling.record.summary
