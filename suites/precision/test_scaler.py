"""A gradient scaler for shards: one rank's overflow affects all ranks."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Exercise, Layout, MatchesOracle, Notes, Trial
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.params import parametrize
from shardproof.suites.precision.scaling import AFTER_AN_INFINITE, AFTER_A_FINITE, AFTER_NONE, scales_together
from shardproof.suites.training import train


@pytest.mark.worlds(SEVERAL)
@pytest.mark.api("ShardedGradScaler")
@pytest.mark.kills("KeepsOverflowLocal")
@parametrize("is_fused", False, True, ids=["plain", "fused"])
def test_ranks_skip_steps_and_change_the_scale_together(trial: Trial, is_fused: bool) -> None:
    """Half the scale after the infinite gradient, twice the scale after two steps without one."""
    script = Exercise(body=scales_together, arguments=(is_fused,))
    trial.holds(
        train(MLP_EVEN, layout=Layout.SHARD, units=(), steps=1, script=script),
        Notes(subject=AFTER_AN_INFINITE, value="as it should, scale 4.0"),
        Notes(subject=AFTER_NONE, value="as it should, scale 4.0"),
        Notes(subject=AFTER_A_FINITE, value="as it should, scale 8.0"),
        MatchesOracle(),
    )
