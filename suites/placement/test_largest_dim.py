"""Each parameter is sharded on its largest dim: the same model, and contiguous shards along that dim."""

from __future__ import annotations

import pytest

from shardproof import FORWARD, LAYOUTS, POWERS_OF_TWO, SEVERAL, HoldsItsShare, Layout, LiesOnTheDimAskedFor
from shardproof import MatchesOracle, Notes, NotesForms, Placement, Problem, RanksAgree
from shardproof import StateLiesWithItsParameter, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.placements import DIVISIBLE_MLP, DIVISIBLE_TRANSFORMER
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train


@pytest.mark.rows("T25")
@pytest.mark.kills(
    "ShardsTheFirstDim",
    "ReassemblesAlongTheFirstDim",
    "ShowsStridedParameters",
)
@pytest.mark.worlds(SEVERAL)
@pytest.mark.worlds(POWERS_OF_TWO)  # so that the ranks divide each largest dim
@parametrize("problem", param(DIVISIBLE_MLP, rows="T08"), param(DIVISIBLE_TRANSFORMER, rows="T24"))
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
