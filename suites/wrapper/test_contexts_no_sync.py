"""Accumulation by ``no_sync``: silent inside, one reduction afterwards, and gradients that are the sum of all."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL, Trial
from suites.wrapper import accumulating
from suites.wrapper.exercised import hold
from suites.wrapper.specimens import Form

pytestmark = pytest.mark.api("no_sync")
FULL, KEEP, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


# Of a pattern of steps, n is one inside no_sync and s one outside.
@pytest.mark.parametrize(
    ("pattern", "strategy", "form"),
    [
        pytest.param("ns", FULL, Form.ORIGINAL, marks=pytest.mark.kills("ReplacesGradients")),
        pytest.param("ns", FULL, Form.FLAT, marks=pytest.mark.kills("ReplacesGradients")),
        pytest.param("sns", FULL, Form.ORIGINAL, marks=pytest.mark.kills("LosesSharesInNoSync")),
        pytest.param("sns", FULL, Form.FLAT, marks=pytest.mark.kills("LosesSharesInNoSync")),
        pytest.param("sns", KEEP, Form.ORIGINAL, marks=pytest.mark.kills("LosesSharesInNoSync")),
        pytest.param("sns", WHOLE, Form.ORIGINAL, marks=pytest.mark.kills("LosesSharesInNoSync")),
        pytest.param("snns", FULL, Form.ORIGINAL, marks=pytest.mark.kills("ReplacesGradients")),
        pytest.param("nnsns", KEEP, Form.FLAT, marks=pytest.mark.kills("ReplacesGradients")),
    ],
)
def test_adds_up_what_was_accumulated(
    trial: Trial, pattern: str, strategy: ShardingStrategy, form: Form
) -> None:
    hold(trial, accumulating.accumulate, "parameters afterwards", arguments=(pattern, strategy, form))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SynchronisesInNoSync")
@pytest.mark.parametrize("strategy", [FULL, KEEP, WHOLE], ids=lambda strategy: strategy.name.lower())
def test_reduces_nothing_inside_and_once_afterwards(trial: Trial, strategy: ShardingStrategy) -> None:
    subjects = ("reductions inside", "reductions afterwards", "reductions inside again")
    hold(trial, accumulating.count_reductions, *subjects, arguments=(strategy,))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("KeepsTheRootInNoSync")
def test_gathers_as_often_whatever_came_before(trial: Trial) -> None:
    subjects = ("a step that gathers every unit", "gathers of each step")
    hold(trial, accumulating.count_gathers, *subjects)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FreesInNoSync")
def test_keeps_inside_what_is_not_freed_after_forward(trial: Trial) -> None:
    hold(trial, accumulating.count_kept_gathers, "gathers of each step")


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("EndsAllNoSyncsAtOnce")
def test_holds_until_the_outermost_ends(trial: Trial) -> None:
    subjects = ("reductions inside both", "reductions inside one", "reductions afterwards")
    hold(trial, accumulating.nest, *subjects)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("StaysSilentAfterAnException")
def test_synchronises_again_after_an_exception(trial: Trial) -> None:
    hold(trial, accumulating.leave_by_an_exception, "the exception", "reductions afterwards")


@pytest.mark.kills("SilencesUnitsAlone")
def test_is_refused_to_a_unit(trial: Trial) -> None:
    hold(trial, accumulating.refuse_for_a_unit, "no_sync of a unit")
