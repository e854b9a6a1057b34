"""Weights that the caller loads into the module, between steps or before an update, are what training goes on from."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Eventful, Interlude, Layout, LoadWeights, NamedOptimizer
from shardproof import Offload, Reshard, Training, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)
_WAYS = (
    param(SGD, {}, id="native", kills="UndoesALoad"),
    param(SGD, {"layout": Layout.SHARD, "reshard": Reshard.KEEP}, id="shard", kills="UndoesALoad"),
    param(SGD, {"layout": Layout.HYBRID}, id="hybrid", kills="UndoesALoad", worlds=FOUR_OR_MORE_EVEN),
    param(SGD, {"layout": Layout.SHARD, "offload": Offload.CPU}, id="host", kills="UndoesALoad"),
)


def _on_host(mutant: str) -> tuple[Any, ...]:  # Any: as `param` returns
    zero1, zero2 = (
        {"layout": layout, "offload": Offload.OPTIMIZER} for layout in (Layout.ZERO1, Layout.ZERO2)
    )
    return param(ADAMW, zero1, id="zero1-host", kills=mutant), param(
        SGD, zero2, id="zero2-host", kills=mutant
    )


# Any, here and below: as for `train`.
def _training(optimizer: NamedOptimizer, asked: dict[str, Any], moment: Interlude, step: int) -> Training:
    return train(MLP_UNEVEN, optimizer, script=Eventful(moves=((moment, LoadWeights(step=step)),)), **asked)


@parametrize("optimizer, asked", *_WAYS, *_on_host("UpdatesTheWeightsOfBeforeALoad"))
@parametrize("step", 0, 1)
def test_trains_on_from_what_was_loaded(
    trial: Trial, optimizer: NamedOptimizer, asked: dict[str, Any], step: int
) -> None:
    trial.holds(_training(optimizer, asked, Interlude.BEFORE, step), *PARITY)


@parametrize("optimizer, asked", *_WAYS, *_on_host("UpdatesTheWeightsOfBackward"))
def test_updates_what_was_loaded_after_backward(
    trial: Trial, optimizer: NamedOptimizer, asked: dict[str, Any]
) -> None:
    trial.holds(_training(optimizer, asked, Interlude.END, step=1), *PARITY)
