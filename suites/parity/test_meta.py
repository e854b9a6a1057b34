"""Models prepared without memory and filled with the first rank's values train like any other."""

from __future__ import annotations

import pytest

from shardproof import EVEN, FOUR_OR_MORE_EVEN, SEVERAL, Capability, HoldsItsShare, Layout, Placement, Problem
from shardproof import Trial
from shardproof.fixtures.placements import DIVISIBLE_MLP
from shardproof.fixtures.problems import MLP_BUFFERS, MLP_DEEP, MLP_UNEVEN, TRANSFORMER
from shardproof.fixtures.tensor_parallel import STACK_16
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

META = frozenset({Capability.META})


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FillsTheFirstRankAlone", "FillsFromAWholeModel")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE, param(Layout.HYBRID, worlds=EVEN))
@parametrize("problem", MLP_UNEVEN, TRANSFORMER, MLP_BUFFERS, MLP_DEEP)
def test_fills_what_was_prepared_without_memory(trial: Trial, problem: Problem, layout: Layout) -> None:
    trial.holds(train(problem, layout=layout, demands=META), *PARITY, HoldsItsShare())


@pytest.mark.kills("FillsTheFirstRankAlone")
@pytest.mark.worlds(EVEN)
def test_fills_shards_of_another_dim(trial: Trial) -> None:
    training = train(DIVISIBLE_MLP, layout=Layout.SHARD, placement=Placement.LARGEST, demands=META)
    trial.holds(training, *PARITY, HoldsItsShare())


@pytest.mark.kills("FillsTheFirstRankAlone")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_fills_tensors_that_are_cut(trial: Trial) -> None:
    trial.holds(train(STACK_16, layout=Layout.SHARD, tensor_parallel=2, demands=META, steps=2), *PARITY)
