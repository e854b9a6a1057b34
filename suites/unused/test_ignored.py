"""Ignored parameters stay whole on every rank and are not communicated.

Those here are frozen: the gradients of a trained one are the caller's responsibility, so ranks may diverge in it, and
no oracle has the right value.
"""

from __future__ import annotations

from math import prod

import pytest
import torch

from shardproof import SEVERAL, Between, Bytes, HoldsItsShare, Layout, MatchesOracle, RanksAgree, Reshard
from shardproof import Training, Trial
from shardproof.fixtures.idle import FROZEN
from shardproof.suites.communication.closed_forms import ClosedForm
from shardproof.suites.training import train
from shardproof.suites.vocabulary import GATHERS_IN_FORWARD

# A whole unit, and one parameter of a unit that has others.
IGNORED = ("base.weight", "base.bias", "head.bias")


def _bytes_of_the_rest(training: Training, world_size: int) -> int:
    return sum(4 * p.numel() for p in _rest(training))


def _padded_bytes_of_the_rest(training: Training, world_size: int) -> int:
    shapes = [p.shape for p in _rest(training)]
    return sum(4 * -(-shape[0] // world_size) * world_size * prod(shape[1:]) for shape in shapes)


def _rest(training: Training) -> list[torch.Tensor]:
    named = training.problem.build().named_parameters()
    return [p for name, p in named if name not in training.plan.ignored]


OTHERS = ClosedForm(name="bytes of the parameters that are not ignored", formula=_bytes_of_the_rest)
PADDED = ClosedForm(name="those bytes, rows padded to the world", formula=_padded_bytes_of_the_rest)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ShardsIgnoredParameters")
def test_leaves_ignored_parameters_whole(trial: Trial) -> None:
    units = tuple(unit for unit in FROZEN.units if unit != "base")
    trial.holds(
        train(FROZEN, layout=Layout.SHARD, units=units, ignored=IGNORED, reshard=Reshard.AFTER_FORWARD),
        MatchesOracle(),
        HoldsItsShare(),
        RanksAgree(),
        Bytes(select=GATHERS_IN_FORWARD, expected=Between(OTHERS, PADDED), minimum=OTHERS),
    )
