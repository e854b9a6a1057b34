"""Ranks may use the parts of one unit in different orders: gradients of one parameter are reduced together anyway."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Accumulation, Capability, Trial, Tuning
from shardproof.fixtures.reordered import REORDERED
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

BY_ARRIVAL = ("PacksGradientsByArrival", "ReducesPiecesByArrival")


@pytest.mark.worlds(SEVERAL)
@parametrize("microbatches", param(1, id="m1", kills=BY_ARRIVAL), param(3, id="m3", kills=BY_ARRIVAL))
def test_ranks_use_parts_in_different_orders(trial: Trial, microbatches: int) -> None:
    demands = frozenset({Capability.RANK_DEPENDENT_ORDER})
    trial.holds(train(REORDERED, demands=demands, microbatches=microbatches), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills(*BY_ARRIVAL)
def test_ranks_hold_back_what_they_used_in_different_orders(trial: Trial) -> None:
    demands = frozenset({Capability.RANK_DEPENDENT_ORDER})
    accumulation = Accumulation.LAST_MICROBATCH
    trial.holds(train(REORDERED, demands=demands, microbatches=2, accumulation=accumulation), *PARITY)


@pytest.mark.worlds(SEVERAL)
@parametrize("tuning", param(Tuning.OVERLAPPED, kills="ReducesPiecesByArrival"))
def test_ranks_reduce_early_in_one_order(trial: Trial, tuning: Tuning) -> None:
    demands = frozenset({Capability.RANK_DEPENDENT_ORDER})
    trial.holds(train(REORDERED, demands=demands, tuning=tuning, microbatches=2), *PARITY)
