"""Parts of a model that are called directly, and methods other than forward."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Grouping, Layout, OnePartOnOddSteps, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.patches import PATCHES
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.params import parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

both_layouts = parametrize("layout", Layout.REPLICATE, Layout.SHARD)


@pytest.mark.rows("T12", "R08")
@pytest.mark.kills("NeverReducesParts")
@parametrize(
    "layout, grouping",
    (Layout.REPLICATE, Grouping.REQUIRED),
    (Layout.SHARD, Grouping.REQUIRED),
    (Layout.NATIVE, Grouping.HINT),
    ids=["replicate", "shard", "native"],
)
def test_a_step_through_one_unit_updates_it_alone(trial: Trial, layout: Layout, grouping: Grouping) -> None:
    script = OnePartOnOddSteps(part="layers.0")
    training = train(MLP_EVEN, layout=layout, grouping=grouping, script=script)
    trial.holds(training, *PARITY)


@pytest.mark.worlds(SEVERAL)  # a lone rank has everything, and nothing to reduce
@pytest.mark.rows("T36", "R16")
@pytest.mark.kills("IgnoresForwardMethods", "NeverReducesForwardMethods")
@both_layouts
def test_a_method_trains_like_forward(trial: Trial, layout: Layout) -> None:
    training = train(
        PATCHES, ADAMW, layout=layout, grouping=Grouping.REQUIRED, forward_methods=(("encoder", "encode"),)
    )
    trial.holds(training, *PARITY)
