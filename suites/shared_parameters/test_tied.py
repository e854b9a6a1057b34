"""An embedding that is also the head: in one group, and over two."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, EveryRowMoves, HoldsItsShare, Layout, MatchesOracle, RanksAgree, Refusal
from shardproof import Reshard, Schedule, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.decoders import TIED
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train, train_sharded

LAWS = (MatchesOracle(), EveryRowMoves(parameter="token.weight"), HoldsItsShare(), RanksAgree())
ONE_GROUP = ("token,head", "blocks.0", "blocks.1")
TWO_GROUPS = ("token", "head")


@pytest.mark.worlds(SEVERAL)  # with one rank, no row is the last rank's
@pytest.mark.rows("T27")
@pytest.mark.kills("UntiesSharedParameters", "SplitsTiedModules")
@parametrize("reshard", param(Reshard.AFTER_FORWARD, id="freed"), param(Reshard.KEEP, id="kept"))
def test_every_row_of_a_tied_parameter_learns(trial: Trial, reshard: Reshard) -> None:
    trial.holds(train_sharded(TIED, ADAMW, units=ONE_GROUP, reshard=reshard), *LAWS)


@pytest.mark.rows("T26", "R13")
@pytest.mark.kills("UntiesSharedParameters", "CountsTheFirstUseAlone")
@parametrize("layout", Layout.REPLICATE, Layout.SHARD)
def test_a_parameter_tied_within_the_root_learns_from_both_uses(trial: Trial, layout: Layout) -> None:
    trial.holds(train(TIED, layout=layout), *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.rows("T28")
@pytest.mark.kills("UntiesSharedParameters")
def test_a_parameter_tied_over_two_groups_is_refused_or_learns_from_both(trial: Trial) -> None:
    trial.holds(train_sharded(TIED, units=TWO_GROUPS), *LAWS, refusal=Refusal.ALLOWED)


@pytest.mark.rows("T29")
@pytest.mark.kills("TellsParametersApartByName")
def test_models_made_one_after_another_are_told_apart(trial: Trial) -> None:
    training = train_sharded(TIED, schedule=Schedule(steps=2, repeats=3))
    trial.holds(training, *LAWS)
