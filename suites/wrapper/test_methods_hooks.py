"""Communication hooks: what they are given, how often, what becomes of it, and who may register one."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL, Trial
from suites.wrapper import hooks
from suites.wrapper.exercised import hold

pytestmark = pytest.mark.api("register_comm_hook")
HOOKED = (
    "calls while gradients accumulate",
    "sums of what it was given",
    "its form",
    "parameters afterwards",
)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("TakesAnyHook")
def test_refuses_what_is_no_hook_or_one_too_many(trial: Trial) -> None:
    subjects = ("what cannot be called", "a hook of a unit", "a second hook", "a hook of replicas")
    hold(trial, hooks.refuse_hooks, *subjects)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("CallsHooksOfReplicasAlone", "CallsHooksTwice")
def test_gives_a_hook_each_gradient_once_and_where_its_share_goes(trial: Trial) -> None:
    hold(trial, hooks.hook_shards, *HOOKED, "a share of the gradient")


@pytest.mark.kills("CallsHooksTwice")
def test_gives_a_hook_of_replicas_each_gradient_once(trial: Trial) -> None:
    hold(trial, hooks.hook_replicas, *HOOKED)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("GivesHooksCopies")
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
    ids=lambda strategy: strategy.name.lower(),
)
def test_trains_alike_with_the_hook_that_is_the_default(trial: Trial, strategy: ShardingStrategy) -> None:
    hold(trial, hooks.hook_by_default, "parameters afterwards", arguments=(strategy,))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("CompressesNothing")
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD],
    ids=lambda strategy: strategy.name.lower(),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d).partition(".")[2])
def test_compresses_gradients_within_rounding(
    trial: Trial, dtype: torch.dtype, strategy: ShardingStrategy
) -> None:
    subjects = ("what crossed", "gradients that are kept", "gradients")
    hold(trial, hooks.compress, *subjects, arguments=(dtype, strategy))
