"""ShardedGradScaler: all ranks skip a step, or none does."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, MatchesOracle, Notes, Trial
from suites.wrapper.exercises.scaler import skips_together
from suites.wrapper.exercising import exercise


@pytest.mark.kills("KeepsOverflowLocal")
@pytest.mark.worlds(SEVERAL)  # a lone rank is all ranks
@pytest.mark.api("ShardedGradScaler")
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
def test_an_infinite_gradient_on_one_rank_stops_all(trial: Trial, is_last: bool) -> None:
    trial.holds(
        exercise(skips_together, is_last),
        Notes(subject="after an infinite gradient", value="still, scale 4.0"),
        Notes(subject="after finite gradients", value="moved, scale 8.0"),
        MatchesOracle(),
    )
