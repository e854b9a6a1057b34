"""The older names for the state of optimizers: full, sharded, scattered, flattened, and keyed by number or name."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL, Trial
from suites.wrapper import saved_optimizers
from suites.wrapper.exercised import hold
from suites.wrapper.saved_optimizers import Kind, Route
from suites.wrapper.specimens import Form, Wrapping

SHARDS, FLAT = Wrapping(), Wrapping(form=Form.FLAT)
WHOLE = Wrapping(strategy=ShardingStrategy.NO_SHARD)
FLAT_HEAD = Wrapping(form=Form.FLAT, units=("head",))
LOSSES = pytest.mark.kills("LosesMomentum")
STEPS = pytest.mark.kills("RestartsTheCountOfSteps")
BY_KIND = pytest.mark.parametrize(
    ("kind", "before"),
    [pytest.param(Kind.SGD, SHARDS, marks=LOSSES), pytest.param(Kind.ADAMW, FLAT, marks=STEPS)],
    ids=lambda value: value.name.lower() if isinstance(value, Kind) else str(value),
)


@BY_KIND
@pytest.mark.api("full_optim_state_dict", "shard_full_optim_state_dict")
def test_shards_what_every_rank_has_whole(trial: Trial, kind: Kind, before: Wrapping) -> None:
    _resume(trial, Route.SHARD_FULL, kind, before)


@BY_KIND
@pytest.mark.api("full_optim_state_dict", "scatter_full_optim_state_dict")
def test_scatters_what_rank_0_has_whole(trial: Trial, kind: Kind, before: Wrapping) -> None:
    _resume(trial, Route.SCATTER_FULL, kind, before)


@BY_KIND
@pytest.mark.worlds(SEVERAL)
@pytest.mark.api("sharded_optim_state_dict", "flatten_sharded_optim_state_dict")
def test_flattens_what_ranks_have_in_shards(trial: Trial, kind: Kind, before: Wrapping) -> None:
    _resume(trial, Route.FLATTEN_SHARDED, kind, before)


@pytest.mark.parametrize(
    ("kind", "before"),
    [pytest.param(Kind.SGD, SHARDS, marks=LOSSES), pytest.param(Kind.ADAMW, WHOLE, marks=STEPS)],
    ids=lambda value: value.name.lower() if isinstance(value, Kind) else str(value),
)
@pytest.mark.kills("RekeysToEachOther")
@pytest.mark.api("rekey_optim_state_dict", "OptimStateKeyType")
def test_hands_state_to_a_plain_optimizer_by_number(trial: Trial, kind: Kind, before: Wrapping) -> None:
    subjects = (
        "the keys",
        "the members of the group",
        "the keys when nothing is to be done",
        "parameters afterwards",
    )
    hold(trial, saved_optimizers.resume_plain, *subjects, arguments=(kind, before))


@pytest.mark.kills("RekeysToEachOther")
@pytest.mark.api("rekey_optim_state_dict", "shard_full_optim_state_dict", "OptimStateKeyType")
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_takes_state_of_a_plain_optimizer_by_name(trial: Trial, kind: Kind) -> None:
    subjects = ("the keys", "parameters afterwards")
    hold(trial, saved_optimizers.resume_wrapped_from_plain, *subjects, arguments=(kind,))


def _resume(trial: Trial, route: Route, kind: Kind, before: Wrapping) -> None:
    arguments = (route, kind, before, FLAT_HEAD)
    hold(trial, saved_optimizers.resume, "parameters afterwards", arguments=arguments)
