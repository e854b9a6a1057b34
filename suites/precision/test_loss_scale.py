"""Losses are scaled for backward and gradients unscaled for the step; all ranks skip a step that overflows."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Clip, Layout, LossScaling, Trial
from shardproof.fixtures.problems import EXACT_LINEAR, MLP_UNEVEN
from shardproof.suites.params import parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

# The gradient that overflows is a row of the last layer's: under a sharded layout only one rank has it.
OVERFLOWING = LossScaling(overflows_at=1, growth_interval=1)
GROWING = LossScaling(growth_interval=2)


@pytest.mark.kills("UnscalesByTheNextScale")
def test_trains_under_a_scale_that_grows(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, steps=4, microbatches=2, scaling=GROWING), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SkipsOverflowsAlone")
@parametrize("layout", Layout.NATIVE, Layout.SHARD)
def test_all_ranks_skip_a_step_that_overflows_on_one(trial: Trial, layout: Layout) -> None:
    trial.holds(train(EXACT_LINEAR, layout=layout, scaling=OVERFLOWING), *PARITY)


@pytest.mark.kills("ClipsAsIfStillScaled")
def test_clips_by_the_norm_of_unscaled_gradients(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, clip=Clip(max_norm=0.3), scaling=OVERFLOWING), *PARITY)
