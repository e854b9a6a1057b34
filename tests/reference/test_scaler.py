"""Ranks skip a step and change the scale together, whichever of them saw a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as ScalerOfTorch

from engine import reference
from engine.reference.optim import ShardedGradScaler
from harness.tracing.ledger import Op
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.oracle import run_world

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
class Told:
    """What one rank was left with after each step."""

    scales: tuple[float, ...]
    trackers: tuple[int, ...]
    parameters: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a rank trains one parameter."""

    make: Callable[..., Scaler] = ShardedGradScaler
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=dict)
    unscales_first: bool = False
    dtype: torch.dtype = torch.float32


def _train(context: RankContext, story: Story, setup: Setup) -> Told:
    parameter = nn.Parameter(torch.zeros(1, dtype=setup.dtype))
    optimizer = setup.optimizer([parameter], lr=RATE, **setup.options)
    scaler = setup.make("cpu", init_scale=INIT_SCALE, growth_interval=2)
    scales, trackers, parameters = [], [], []
    for values in story:
        optimizer.zero_grad()
        value = values[context.rank]
        scale = scaler.scale(torch.ones(()))
        if value is not None:
            parameter.grad = torch.full((1,), value * float(scale), dtype=setup.dtype)
        if setup.unscales_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        trackers.append(scaler._get_growth_tracker())
        parameters.append(float(parameter.detach()))
    return Told(scales=tuple(scales), trackers=tuple(trackers), parameters=tuple(parameters))


def _expected(story: Story, rank: int) -> Told:
    """Say what a scaler does that sees all ranks' gradients."""
    scale, tracker, parameter = INIT_SCALE, 0, 0.0
    scales, trackers, parameters = [], [], []
    for values in story:
        if all(value is None or math.isfinite(value) for value in values):
            parameter -= RATE * (values[rank] or 0.0)
            tracker += 1
            if tracker == 2:
                scale, tracker = scale * 2, 0
        else:
            scale, tracker = scale / 2, 0
        scales.append(scale)
        trackers.append(tracker)
        parameters.append(parameter)
    return Told(scales=tuple(scales), trackers=tuple(trackers), parameters=tuple(parameters))


SETUPS = {
    "sgd": Setup(),
    "unscale": Setup(unscales_first=True),
    "half": Setup(dtype=torch.float16),
    "fused": Setup(options={"fused": True}),
    "fused-unscale": Setup(options={"fused": True}, unscales_first=True),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_ranks_step_and_scale_together(story: Story, setup: Setup, tmp_path: Path) -> None:
    told = run_world(WorldKind.THREADS, SIZE, _train, story, setup, folder=tmp_path)
    assert told == [_expected(story, rank) for rank in range(SIZE)]


def test_ranks_that_are_processes_do_so_too(tmp_path: Path) -> None:
    story = STORIES["one-without-one-infinite"]
    told = run_world(WorldKind.PROCESSES, SIZE, _train, story, Setup(), folder=tmp_path)
    assert told == [_expected(story, rank) for rank in range(SIZE)]


@pytest.mark.parametrize("story", ["all-finite", "one-infinite", "one-without", "often"])
def test_scales_are_those_of_torch(story: str, tmp_path: Path) -> None:
    setup = Setup(make=ScalerOfTorch)
    told = run_world(WorldKind.THREADS, SIZE, _train, STORIES[story], setup, folder=tmp_path)
    assert told == [_expected(STORIES[story], rank) for rank in range(SIZE)]


def test_a_scaler_that_asks_itself_alone_lets_ranks_part(tmp_path: Path) -> None:
    """The stories tell a scaler that agrees from one that does not."""
    story, setup = STORIES["one-infinite"], Setup(make=GradScaler)
    told = run_world(WorldKind.THREADS, SIZE, _train, story, setup, folder=tmp_path)
    assert told != [_expected(story, rank) for rank in range(SIZE)]
    assert len({t.scales for t in told}) > 1


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
def test_one_collective_for_each_optimizer_and_step(unscales_first: bool, tmp_path: Path) -> None:
    assert run_world(WorldKind.THREADS, 2, _count, unscales_first, True, folder=tmp_path) == [[1, 2]] * 2


def test_a_scaler_that_is_not_enabled_communicates_nothing(tmp_path: Path) -> None:
    assert run_world(WorldKind.THREADS, 2, _count, False, False, folder=tmp_path) == [[0, 0]] * 2


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


def test_ranks_of_another_group_are_not_asked(tmp_path: Path) -> None:
    assert run_world(WorldKind.THREADS, 4, _train_in_a_part, folder=tmp_path) == [16.0, 16.0, 8.0, 8.0]


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


def test_finding_of_one_device_reaches_all_devices_of_all_ranks(tmp_path: Path) -> None:
    assert run_world(WorldKind.THREADS, 2, _agree_over_devices, folder=tmp_path) == [
        [[0.0], [1.0], [1.0]],
        [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
    ]


# --- models -------------------------------------------------------------------------------------------------------


def _train_shards(context: RankContext) -> list[float]:
    model = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    reference.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scaler = ShardedGradScaler("cpu", init_scale=INIT_SCALE)
    sums = []
    for bad in (False, True, False):
        rows = torch.ones(1, 2)
        weights = torch.tensor(
            [1.0, 1.0, math.inf if bad else 1.0]
        )  # the last row's shard is the last rank's
        optimizer.zero_grad()
        scaler.scale((model(rows) * weights).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        sums.append(float(sum(p.to_local().sum() for p in model.parameters())))  # type: ignore[attr-defined]
        sums.append(scaler.get_scale())
    return sums


def test_shards_step_together(tmp_path: Path) -> None:
    told = run_world(WorldKind.THREADS, SIZE, _train_shards, folder=tmp_path)
    assert told == [[1.5, 16.0, 1.5, 8.0, 1.0, 8.0]] * SIZE


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
