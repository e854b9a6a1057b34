"""An engine whose step clips uses the norm of the whole gradient, once, and does not scale small gradients up."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Trial
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

# A third to an eighth of the actual norms, so that parameters still move; and far above all of them.
LIMIT, PLENTY = 0.3, 1000.0


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ClipsPiecesByTheirOwnNorm", "ClipsNothingInTheStep")
def test_the_step_clips_by_the_norm_of_the_whole(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, clip_in_step=LIMIT), *PARITY)


@pytest.mark.kills("ClipsWhatEachMicrobatchAdds")
def test_the_step_clips_what_all_microbatches_accumulated(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, clip_in_step=LIMIT, microbatches=3), *PARITY)


@pytest.mark.kills("ScalesSmallGradientsUpInTheStep")
def test_the_step_leaves_small_gradients_alone(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, clip_in_step=PLENTY), *PARITY)
