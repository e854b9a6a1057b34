"""With optimizer state on the host an engine trains the same model, and additionally holds only a copy of its share.

On a CPU the host is the device: there these cases show that no value is lost. On an accelerator they also show that the
state has left it.
"""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Accumulation, HoldsItsShare, Layout, MatchesOracle, MemoryIsExplained
from shardproof import NamedOptimizer, Offload, RanksAgree, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train

LAWS = (MatchesOracle(), HoldsItsShare(), MemoryIsExplained(), RanksAgree())

pytestmark = pytest.mark.worlds(SEVERAL)
on_the_device = pytest.mark.kills("LeavesStateOnTheDevice", world="threads:2:cuda")  # SGD has no state


@parametrize("layout", Layout.ZERO1, Layout.ZERO2)
@parametrize(
    "optimizer, microbatches",
    param(SGD, 1, id="sgd-m1", kills="CopiesNothingBack"),
    param(ADAMW, 3, id="adamw-m3", kills="OverwritesGradientsOnTheHost", marks=on_the_device),
)
def test_trains_the_same_model_from_the_host(
    trial: Trial, layout: Layout, optimizer: NamedOptimizer, microbatches: int
) -> None:
    training = train(
        MLP_UNEVEN, optimizer, layout=layout, offload=Offload.OPTIMIZER, microbatches=microbatches
    )
    trial.holds(training, *LAWS)


@pytest.mark.kills("CopiesNothingBack")
@parametrize("layout", Layout.ZERO1, Layout.ZERO2)
def test_accumulates_in_silence_before_the_host(trial: Trial, layout: Layout) -> None:
    training = train(
        MLP_UNEVEN,
        ADAMW,
        layout=layout,
        offload=Offload.OPTIMIZER,
        accumulation=Accumulation.LAST_MICROBATCH,
        microbatches=3,
    )
    trial.holds(training, *LAWS)
