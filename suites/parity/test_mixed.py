"""Sharded and replicated units, nested in one model: each has its planned layout."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import SEVERAL, Accumulation, Count, Exactly, Grouping, HoldsItsShare, Layout
from shardproof import MatchesOracle, Problem, RanksAgree, Training, Trial
from shardproof.fixtures.chain import NESTED_CHAIN
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import TRANSFORMER
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import ALL_REDUCES, REDUCE_SCATTERS

pytestmark = pytest.mark.worlds(SEVERAL)

INNER, OUTER = NESTED_CHAIN.units[::2], NESTED_CHAIN.units[1::2]
NESTINGS = [
    param(OUTER[1:2], id="a_block"),
    param(INNER, id="inner"),
    param(OUTER, id="outer"),
    param(("",), id="root"),
    param((*INNER, ""), id="inner_and_root"),
    param((*OUTER, ""), id="outer_and_root"),
]


@pytest.mark.kills("ShardsWhatItShouldReplicate")
@parametrize("replicated", *NESTINGS)
def test_nested_units_lie_as_each_was_asked_to(trial: Trial, replicated: tuple[str, ...]) -> None:
    num_units = len(NESTED_CHAIN.units) + 1
    trial.holds(
        _training(NESTED_CHAIN, replicated),
        MatchesOracle(),
        HoldsItsShare(),
        Count(select=ALL_REDUCES, expected=Exactly(len(replicated))),
        Count(select=REDUCE_SCATTERS, expected=Exactly(num_units - len(replicated))),
        RanksAgree(),
    )


@pytest.mark.kills("ShardsWhatItShouldReplicate")
@parametrize("replicated", ("blocks.0",), ("",), ids=["block", "root"])
def test_a_transformer_of_both_accumulates(trial: Trial, replicated: tuple[str, ...]) -> None:
    training = _training(
        TRANSFORMER, replicated, microbatches=3, accumulation=Accumulation.LAST_MICROBATCH, steps=2
    )
    trial.holds(training, MatchesOracle(), HoldsItsShare(), RanksAgree())


# Any: as for `train`.
def _training(problem: Problem, replicated: tuple[str, ...], **others: Any) -> Training:
    return train(
        problem, ADAMW, layout=Layout.SHARD, grouping=Grouping.REQUIRED, replicated=replicated, **others
    )
