"""Ignored parameters stay whole on every rank and are not communicated.

Those here are frozen. The gradients of trained ones are the caller's to synchronise: see `OWN_PART` of programs.
"""

from __future__ import annotations


import pytest

from shardproof import SEVERAL, Between, Bytes, HoldsItsShare, Layout, MatchesOracle, RanksAgree, Reshard
from shardproof import Trial
from shardproof.fixtures.idle import FROZEN
from shardproof.suites.closed_forms import ClosedForm, all_parameters
from shardproof.suites.training import train
from shardproof.suites.vocabulary import GATHERS_IN_FORWARD

# A whole unit, and one parameter of a unit that has others.
IGNORED = ("base.weight", "base.bias", "head.bias")


OTHERS = ClosedForm(
    name="bytes of the parameters that are not ignored",
    formula=lambda training, _: all_parameters(training, without=IGNORED).num_bytes,
)
PADDED = ClosedForm(
    name="those bytes, rows padded to the world",
    formula=lambda training, size: all_parameters(training, without=IGNORED).padded_bytes(size),
)


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
