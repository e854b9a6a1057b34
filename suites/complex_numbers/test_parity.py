"""Complex parameters and buffers are those of one process, whatever the layout and the optimizer."""

from __future__ import annotations

import pytest

from fixtures.complex_numbers import ROTARY, SPECTRAL
from fixtures.optimizers import ADAMW, SGD, AdamW, Sgd
from shardproof import (
    SEVERAL,
    Accumulation,
    Capability,
    Layout,
    MatchesOracle,
    Plan,
    RanksAgree,
    Schedule,
    Training,
    Trial,
)

LAWS = (MatchesOracle(), RanksAgree())
COMPLEX = frozenset({Capability.COMPLEX})


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ForgetsUnsavedBuffers")
def test_turns_by_a_complex_buffer(trial: Trial) -> None:
    trial.holds(Training(problem=ROTARY, optimizer=SGD, plan=Plan(units=ROTARY.units)), *LAWS)


@pytest.mark.kills("DropsImaginaryParts")
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda value: value.name)
def test_trains_complex_parameters(trial: Trial, optimizer: Sgd | AdamW) -> None:
    plan = Plan(units=SPECTRAL.units, demands=COMPLEX)
    trial.holds(Training(problem=SPECTRAL, optimizer=optimizer, plan=plan), *LAWS)


@pytest.mark.kills("DropsImaginaryParts")
@pytest.mark.parametrize("accumulation", Accumulation, ids=lambda value: value.name.lower())
def test_accumulates_complex_gradients(trial: Trial, accumulation: Accumulation) -> None:
    plan = Plan(units=SPECTRAL.units, accumulation=accumulation, demands=COMPLEX)
    schedule = Schedule(microbatches=3)
    trial.holds(Training(problem=SPECTRAL, optimizer=SGD, plan=plan, schedule=schedule), *LAWS)


@pytest.mark.kills("DropsImaginaryParts")
def test_replicates_complex_parameters(trial: Trial) -> None:
    plan = Plan(layout=Layout.REPLICATE, units=SPECTRAL.units, demands=COMPLEX)
    trial.holds(Training(problem=SPECTRAL, optimizer=ADAMW, plan=plan), *LAWS)
