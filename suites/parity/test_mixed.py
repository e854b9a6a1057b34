"""Units that are sharded and units that are replicated, nested in one model: each lies as it was asked to."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import (
    SEVERAL,
    Accumulation,
    Count,
    Exactly,
    Grouping,
    HoldsItsShare,
    Layout,
    MatchesOracle,
    Op,
    Phase,
    Problem,
    RanksAgree,
    Select,
    Training,
    Trial,
)
from shardproof.fixtures.chain import NESTED_CHAIN
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import TRANSFORMER
from shardproof.suites.training import train

INNER, OUTER = NESTED_CHAIN.units[::2], NESTED_CHAIN.units[1::2]
SUMS = Select(ops=(Op.ALL_REDUCE,), phases=(Phase.BACKWARD,))
SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,))
NESTINGS = [
    pytest.param(OUTER[1:2], id="a_block"),
    pytest.param(INNER, id="inner"),
    pytest.param(OUTER, id="outer"),
    pytest.param(("",), id="root"),
    pytest.param((*INNER, ""), id="inner_and_root"),
    pytest.param((*OUTER, ""), id="outer_and_root"),
]


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ShardsWhatItShouldReplicate")
@pytest.mark.parametrize("replicated", NESTINGS)
def test_nested_units_lie_as_each_was_asked_to(trial: Trial, replicated: tuple[str, ...]) -> None:
    num_units = len(NESTED_CHAIN.units) + 1
    trial.holds(
        _training(NESTED_CHAIN, replicated),
        MatchesOracle(),
        HoldsItsShare(),
        Count(select=SUMS, expected=Exactly(len(replicated))),
        Count(select=SCATTERS, expected=Exactly(num_units - len(replicated))),
        RanksAgree(),
    )


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ShardsWhatItShouldReplicate")
@pytest.mark.parametrize("replicated", [("blocks.0",), ("",)], ids=["block", "root"])
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
