"""Each parameter is sharded on its largest dim: the same model, and shards that lie as asked and are contiguous."""

from __future__ import annotations

from operator import attrgetter

import pytest

from engine.contract import Layout, Placement
from fixtures.optimizers import ADAMW
from fixtures.placements import DIVISIBLE_MLP, DIVISIBLE_TRANSFORMER
from harness.cases.scripts.forms import FORWARD, LAYOUTS, NotesForms
from harness.cases.training import Problem
from harness.laws.communication.matching import RanksAgree
from harness.laws.notes import Notes
from harness.laws.parity import MatchesOracle
from harness.laws.sharding.holdings import HoldsItsShare
from harness.laws.sharding.placement import LiesOnTheDimAskedFor, StateLiesWithItsParameter
from harness.runner.fixture import Trial
from harness.worlds.sizes import POWERS_OF_TWO, SEVERAL
from suites.training import train


@pytest.mark.rows("T25")
@pytest.mark.kills(
    "ShardsTheFirstDim",
    "ReassemblesAlongTheFirstDim",
    "KeepsWholeOptimizerState",
    "ShowsStridedParameters",
    "HandsOutStridedGradients",
)
@pytest.mark.worlds(SEVERAL)
@pytest.mark.worlds(POWERS_OF_TWO)  # so that the ranks divide each largest dim
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(DIVISIBLE_MLP, marks=pytest.mark.rows("T08")),
        pytest.param(DIVISIBLE_TRANSFORMER, marks=pytest.mark.rows("T24")),
    ],
    ids=attrgetter("name"),
)
def test_shards_the_largest_dim(trial: Trial, problem: Problem) -> None:
    trial.holds(
        train(problem, ADAMW, layout=Layout.SHARD, placement=Placement.LARGEST, script=NotesForms()),
        MatchesOracle(),
        HoldsItsShare(),
        LiesOnTheDimAskedFor(),
        StateLiesWithItsParameter(),
        Notes(subject=FORWARD, value="contiguous"),
        Notes(subject=LAYOUTS, value="contiguous"),
        RanksAgree(),
    )
