"""Weights that the caller loads into the module between two steps are those that training goes on from."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Eventful, Interlude, Layout, LoadWeights, NamedOptimizer
from shardproof import Offload, Reshard, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)
ON_HOST = "UpdatesTheWeightsOfBeforeALoad"


@parametrize(
    "optimizer, asked",
    param(SGD, {}, id="native", kills="UndoesALoad"),
    param(SGD, {"layout": Layout.SHARD, "reshard": Reshard.KEEP}, id="shard", kills="UndoesALoad"),
    param(SGD, {"layout": Layout.HYBRID}, id="hybrid", kills="UndoesALoad", worlds=FOUR_OR_MORE_EVEN),
    param(SGD, {"layout": Layout.SHARD, "offload": Offload.CPU}, id="host", kills="UndoesALoad"),
    param(ADAMW, {"layout": Layout.ZERO1, "offload": Offload.OPTIMIZER}, id="zero1-host", kills=ON_HOST),
    param(SGD, {"layout": Layout.ZERO2, "offload": Offload.OPTIMIZER}, id="zero2-host", kills=ON_HOST),
)
@parametrize("step", 0, 1)
# Any: as for `train`.
def test_trains_on_from_what_was_loaded(
    trial: Trial, optimizer: NamedOptimizer, asked: dict[str, Any], step: int
) -> None:
    loads = Eventful(moves=((Interlude.BEFORE, LoadWeights(step=step)),))
    trial.holds(train(MLP_UNEVEN, optimizer, script=loads, **asked), *PARITY)
