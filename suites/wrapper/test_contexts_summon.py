"""Whole parameters in a context: what is shown inside, what is kept afterwards, and where it is refused."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL, Trial
from suites.wrapper import summoning
from suites.wrapper.exercised import hold
from suites.wrapper.specimens import Form

pytestmark = pytest.mark.api("summon_full_params")
FORMS = pytest.mark.parametrize("form", Form, ids=lambda form: form.name.lower())
STRATEGIES = pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
    ids=lambda strategy: strategy.name.lower(),
)


@FORMS
@STRATEGIES
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("MisalignsWhatItSummons")
def test_shows_whole_parameters_by_their_names(trial: Trial, strategy: ShardingStrategy, form: Form) -> None:
    subjects = (
        "parameters inside",
        "shapes outside",
        "parameters after a forward",
        "parameters after a backward",
    )
    hold(trial, summoning.summon_values, *subjects, arguments=(strategy, form))


@pytest.mark.kills("MisalignsWhatItSummons")
def test_shows_those_of_all_wrapped_modules_below(trial: Trial) -> None:
    hold(trial, summoning.summon_of_others, "parameters inside")


@FORMS
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverWritesBack")
def test_writes_back_what_was_changed(trial: Trial, form: Form) -> None:
    subjects = ("parameters afterwards", "an output afterwards")
    hold(trial, summoning.write_back, *subjects, arguments=(form,))


@FORMS
@pytest.mark.worlds(SEVERAL)  # of one rank there are no shards, and what is changed stays
@pytest.mark.kills("AlwaysWritesBack")
def test_forgets_what_was_changed_without_writing_back(trial: Trial, form: Form) -> None:
    hold(trial, summoning.write_and_forget, "parameters afterwards", arguments=(form,))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("WritesBackFromRank0")
def test_writes_back_the_share_of_each_rank(trial: Trial) -> None:
    subjects = ("all numbers, in the order of ranks", "what others see")
    hold(trial, summoning.write_shares, *subjects)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("AlwaysSummonsAll")
def test_summons_the_root_alone(trial: Trial) -> None:
    hold(trial, summoning.summon_here, "the root's own", "those of units", "whole ones of units")


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SummonsOnAllRanks")
def test_summons_on_rank_0_alone(trial: Trial) -> None:
    hold(trial, summoning.summon_on_rank_0, "what the rank sees", "shapes outside")


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
def test_summons_to_the_host(trial: Trial) -> None:
    subjects = ("parameters inside", "where they are", "where they are afterwards")
    hold(trial, summoning.summon_to_host, *subjects)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
def test_summons_to_the_host_of_rank_0_alone(trial: Trial) -> None:
    subjects = ("what the rank sees", "shapes outside", "parameters afterwards")
    hold(trial, summoning.summon_to_the_host_of_rank_0, *subjects)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
def test_writes_back_from_the_host(trial: Trial) -> None:
    hold(trial, summoning.write_back_from_the_host, "parameters afterwards")


@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(ShardingStrategy.FULL_SHARD, marks=pytest.mark.kills("SummonsNoGradients")),
        pytest.param(ShardingStrategy.SHARD_GRAD_OP, marks=pytest.mark.kills("SummonsNoGradients")),
        pytest.param(ShardingStrategy.NO_SHARD, marks=pytest.mark.kills("MisalignsWhatItSummons")),
    ],
    ids=lambda strategy: strategy.name.lower(),
)
def test_shows_whole_gradients(trial: Trial, strategy: ShardingStrategy) -> None:
    subjects = ("gradients before there are any", "gradients inside", "parameters afterwards")
    hold(trial, summoning.summon_gradients, *subjects, arguments=(strategy,))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SummonsNoGradients")
def test_writes_gradients_back(trial: Trial) -> None:
    hold(trial, summoning.write_gradients, "shapes inside", "parameters afterwards")


@pytest.mark.kills("TakesEveryCombination")
def test_refuses_what_cannot_be_combined(trial: Trial) -> None:
    subjects = (
        "rank 0 alone that writes back",
        "gradients on the host",
        "gradients of flat parameters",
        "parameters afterwards",
    )
    hold(trial, summoning.refuse_combinations, *subjects)


@pytest.mark.kills("SummonsAnywhere")
def test_refuses_to_summon_what_is_summoned(trial: Trial) -> None:
    subjects = ("summoning inside", "parameters inside", "parameters afterwards")
    hold(trial, summoning.refuse_inside_itself, *subjects)


@pytest.mark.kills("SummonsAnywhere")
def test_refuses_to_summon_in_forward(trial: Trial) -> None:
    hold(trial, summoning.refuse_inside_forward, "summoning in forward")


@pytest.mark.kills("SummonsAnywhere")
def test_refuses_to_summon_in_backward(trial: Trial) -> None:
    hold(trial, summoning.refuse_inside_backward, "summoning in backward")


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverWritesBack")
def test_frees_and_writes_back_after_an_exception(trial: Trial) -> None:
    subjects = ("the exception", "shapes afterwards", "parameters afterwards")
    hold(trial, summoning.leave_by_an_exception, *subjects)
