"""With parameters on the host an engine trains the same model, and keeps gradients there too.

Memory that is pinned is a matter of GPUs: see suites/gpu.
"""

from __future__ import annotations

import pytest

from shardproof import FOUR_OR_MORE_EVEN, HOMES, Accumulation, Layout, MatchesOracle, Notes, NotesForms
from shardproof import Offload, Plan, RanksAgree, Schedule, Training, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN, TRANSFORMER
from shardproof.suites.training import train

LAWS = (MatchesOracle(), Notes(subject=HOMES, value="cpu"), RanksAgree())


@pytest.mark.rows("T10", "R07")
@pytest.mark.kills("OffloadsZeros", "OffloadsLastBackwardsGradients", "UpdatesACopy")
def test_trains_the_same_transformer_from_the_host(trial: Trial) -> None:
    trial.holds(train(TRANSFORMER, ADAMW, offload=Offload.CPU, script=NotesForms()), *LAWS)


@pytest.mark.rows("T10", "R07")
@pytest.mark.kills("OverwritesOffloadedGradients", "OffloadsLastBackwardsGradients")
def test_adds_microbatches_on_the_host(trial: Trial) -> None:
    plan = Plan(offload=Offload.CPU, units=MLP_UNEVEN.units)
    trial.holds(_three_microbatches(plan), *LAWS)


@pytest.mark.kills("OffloadsZeros", "UpdatesACopy")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_accumulates_over_replicas_on_the_host(trial: Trial) -> None:
    plan = Plan(
        layout=Layout.HYBRID,
        offload=Offload.CPU,
        units=MLP_UNEVEN.units,
        accumulation=Accumulation.LAST_MICROBATCH,
    )
    trial.holds(_three_microbatches(plan), *LAWS)


def _three_microbatches(plan: Plan) -> Training:
    schedule = Schedule(microbatches=3)
    return Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan, schedule=schedule, script=NotesForms())
