"""Ranks skip a step and change the scale together, whichever of them saw a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as ScalerOfTorch

from shardproof.engine.reference.optim import ShardedGradScaler
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldKind
from tests.reference.ranks import Ranks

SIZE = 3
INIT_SCALE = 16.0
RATE = 0.5
# What a rank's gradient holds in each step, before it is scaled; None is a rank without a gradient.
Story = tuple[tuple[float | None, ...], ...]
# Any: torch's scaler has no types.
Scaler = Any

FINITE = (1.0, 2.0, 3.0)
STORIES: dict[str, Story] = {
    "all-finite": (FINITE, FINITE, FINITE),
    "one-infinite": (FINITE, (1.0, math.inf, 3.0), FINITE),
    "one-not-a-number": ((math.nan, 2.0, 3.0), FINITE),
    "the-last-infinite": ((1.0, 2.0, -math.inf),),
    "all-infinite": ((math.inf,) * 3, FINITE),
    "one-without": ((1.0, None, 3.0), FINITE),
    "one-without-one-infinite": ((None, math.inf, 3.0), FINITE),
    "none-at-all": ((None, None, None), FINITE),
    "often": ((math.inf, 2.0, 3.0), (1.0, math.inf, 3.0), FINITE, FINITE, FINITE, (1.0, 2.0, math.nan)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a rank trains one parameter."""

    make: Callable[..., Scaler] = ShardedGradScaler
    options: dict[str, Any] = field(default_factory=dict)
    unscales_first: bool = False
    dtype: torch.dtype = torch.float32


# What one rank is left with after each step: the scale, how many finite steps it counts, and the parameter.
Left = list[tuple[float, int, float]]


def _train(rank: int, story: Story, setup: Setup) -> Left:
    parameter = nn.Parameter(torch.zeros(1, dtype=setup.dtype))
    optimizer = torch.optim.SGD([parameter], lr=RATE, **setup.options)
    scaler = setup.make("cpu", init_scale=INIT_SCALE, growth_interval=2)
    left = []
    for values in story:
        optimizer.zero_grad()
        value = values[rank]
        scale = scaler.scale(torch.ones(()))
        if value is not None:
            parameter.grad = torch.full((1,), value * float(scale), dtype=setup.dtype)
        if setup.unscales_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        left.append((scaler.get_scale(), scaler._get_growth_tracker(), float(parameter.detach())))
    return left


def _train_each(context: RankContext, setup: Setup, names: list[str]) -> dict[str, Left]:
    return {name: _train(context.rank, STORIES[name], setup) for name in names}


def _expected(story: Story, rank: int) -> Left:
    """Compute what a scaler does that sees all ranks' gradients."""
    scale, tracker, parameter = INIT_SCALE, 0, 0.0
    left = []
    for values in story:
        if all(value is None or math.isfinite(value) for value in values):
            parameter -= RATE * (values[rank] or 0.0)
            tracker += 1
            if tracker == 2:
                scale, tracker = scale * 2, 0
        else:
            scale, tracker = scale / 2, 0
        left.append((scale, tracker, parameter))
    return left


def _assert_is_right(told: list[dict[str, Left]]) -> None:
    for rank, found in enumerate(told):
        assert found == {name: _expected(STORIES[name], rank) for name in found}


SETUPS = {
    "sgd": Setup(),
    "unscale": Setup(unscales_first=True),
    "half": Setup(dtype=torch.float16),
    "fused": Setup(options={"fused": True}),
    "fused-unscale": Setup(options={"fused": True}, unscales_first=True),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_ranks_step_and_scale_together(setup: Setup, ranks: Ranks) -> None:
    _assert_is_right(ranks.run(SIZE, _train_each, setup, list(STORIES)))


def test_ranks_that_are_processes_do_so_too(ranks: Ranks) -> None:
    told = ranks.run(SIZE, _train_each, Setup(), ["one-without-one-infinite"], kind=WorldKind.PROCESSES)
    _assert_is_right(told)


def test_scales_are_those_of_torch(ranks: Ranks) -> None:
    stories = ["all-finite", "one-infinite", "one-without", "often"]
    _assert_is_right(ranks.run(SIZE, _train_each, Setup(make=ScalerOfTorch), stories))


def test_a_scaler_that_asks_itself_alone_lets_ranks_part(ranks: Ranks) -> None:
    """The stories tell a scaler that agrees from one that does not."""
    told = ranks.run(SIZE, _train_each, Setup(make=GradScaler), ["one-infinite"])
    with pytest.raises(AssertionError):
        _assert_is_right(told)


# --- one collective -----------------------------------------------------------------------------------------------


def _count(context: RankContext, unscales_first: bool, enabled: bool) -> list[int]:
    parameters = [nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.float64)]
    scaler = ShardedGradScaler("cpu", enabled=enabled)
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in parameters]
    both = torch.optim.SGD(parameters, lr=1.0)
    counts = []
    for stepped in ([both], optimizers):
        before = len(context.recorder.ledger())
        scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for optimizer in stepped:
            if unscales_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        entries = context.recorder.ledger()[before:]
        assert {entry.op for entry in entries} <= {Op.ALL_REDUCE}
        counts.append(len(entries))
    return counts


@pytest.mark.parametrize("unscales_first", [False, True], ids=["step", "unscale"])
def test_one_collective_for_each_optimizer_and_step(unscales_first: bool, ranks: Ranks) -> None:
    assert ranks.run(2, _count, unscales_first, True) == [[1, 2]] * 2


def test_a_scaler_that_is_not_enabled_communicates_nothing(ranks: Ranks) -> None:
    assert ranks.run(2, _count, False, False) == [[0, 0]] * 2


def _train_in_a_part(context: RankContext) -> float:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[context.rank // 2]
    assert isinstance(group, dist.ProcessGroup)
    scaler = ShardedGradScaler("cpu", init_scale=INIT_SCALE, process_group=group)
    parameter = nn.Parameter(torch.zeros(1))
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([math.inf if context.rank == 2 else 1.0])
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    scaler.update()
    return scaler.get_scale()


def test_ranks_of_another_group_are_not_asked(ranks: Ranks) -> None:
    assert ranks.run(4, _train_in_a_part) == [16.0, 16.0, 8.0, 8.0]


def _agree_over_devices(context: RankContext) -> list[list[float]]:
    """Findings are kept by device; that these devices' tensors are on the CPU here changes nothing of that."""
    host, accelerator = torch.device("cpu"), torch.device("cuda", 0)
    scaler = ShardedGradScaler("cpu")
    found = []
    for infinite in (None, host, accelerator):
        mine = {d: torch.tensor(float(context.rank == 1 and d == infinite)) for d in (host, accelerator)}
        if context.rank == 0:
            del mine[accelerator]  # a rank whose shards are all on the host
        agreed = scaler._agreed(mine, host)
        assert agreed.keys() == mine.keys()
        found.append([float(value) for value in agreed.values()])
    return found


def test_finding_of_one_device_reaches_all_devices_of_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, _agree_over_devices) == [
        [[0.0], [1.0], [1.0]],
        [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
    ]


# --- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_losses_keep_their_dtype_and_their_nesting(dtype: torch.dtype) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    loss = torch.tensor(2.0, dtype=dtype)
    single = scaler.scale(loss)
    assert (single.dtype, float(single)) == (dtype, 8.0)
    nested = scaler.scale([loss, (loss, loss)])
    assert [type(part) for part in nested] == [torch.Tensor, tuple]
    assert [float(part) for part in (nested[0], *nested[1])] == [8.0] * 3
    lazily = scaler.scale(loss for _ in range(2))
    assert [(part.dtype, float(part)) for part in lazily] == [(dtype, 8.0)] * 2


def test_something_that_is_no_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a tensor or an iterable of tensors, got 3"):
        ShardedGradScaler("cpu").scale(3)


def test_a_scaler_that_is_not_enabled_gives_losses_back() -> None:
    loss = torch.ones(())
    assert ShardedGradScaler("cpu", enabled=False).scale(loss) is loss


def test_state_is_that_of_a_scaler_of_torch() -> None:
    scaler = ShardedGradScaler("cpu", INIT_SCALE, 0.25, 4.0, 7)  # the order of torch's sharded scaler
    theirs = ScalerOfTorch("cpu", INIT_SCALE, 0.25, 4.0, 7)
    assert scaler.state_dict() == theirs.state_dict()
    assert scaler.get_backoff_factor() == 0.25
    other = ShardedGradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
