"""The scaler communicates with its ranks and scales losses; suites/precision has the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as ScalerOfTorch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardproof.engine.reference.fsdp1 import comm_hooks
from shardproof.engine.reference.optim import GradScaler, ShardedGradScaler
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.worlds.rank import RankContext
from tests.reference.ranks import Ranks

INIT_SCALE = 16.0


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


def test_a_disabled_scaler_communicates_nothing(ranks: Ranks) -> None:
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
    """Findings are kept by device; the tensors of these devices may lie on the CPU."""
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


def _overflow_beside(context: RankContext) -> float:
    """Overflow on one rank, in a gradient over whose first axis the gradient before it is whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parameters = []
    for row, placements in (
        (1.0, (Replicate(), Shard(0))),
        (math.inf, (_StridedShard(0, split_factor=2), Shard(0))),
    ):
        found = torch.tensor([row if context.rank == 2 else 1.0])
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, placements, run_check=False))
        parameter.grad = DTensor.from_local(found, mesh, placements, run_check=False)
        parameters.append(parameter)
    scaler = GradScaler("cpu", init_scale=INIT_SCALE)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(parameters, lr=1.0))
    scaler.update()
    return scaler.get_scale()


def test_ranks_agree_over_the_axes_of_every_gradient(ranks: Ranks) -> None:
    assert ranks.run(4, _overflow_beside) == [8.0] * 4


# --- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_losses_keep_their_dtype_and_their_nesting(dtype: torch.dtype) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    loss = torch.tensor(2.0, dtype=dtype)
    single = scaler.scale(loss)
    assert (single.dtype, float(single)) == (dtype, 8.0)
    losses: Any = [loss, (loss, loss)]  # deeper than torch's types go
    nested: Any = scaler.scale(losses)
    assert [type(part) for part in nested] == [torch.Tensor, tuple]
    assert [float(part) for part in (nested[0], *nested[1])] == [8.0] * 3
    lazily = scaler.scale(loss for _ in range(2))
    assert [(part.dtype, float(part)) for part in lazily] == [(dtype, 8.0)] * 2


def test_a_disabled_scaler_returns_losses_unchanged() -> None:
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


# Hooks in low precision.


SIZE = 12  # divisible by every world size here
SIZES = (1, 2, 3, 4, 6)
LOW = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}

# Any: the two modules of hooks share no type.
Hooks = Any


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _gradient(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZE, generator=generator).to(dtype)


# --- results ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One rank's result: values, dtype, and whether its memory is that of the rank's own tensor."""

    values: list[float]
    dtype: str
    is_in_place: bool


def _result(tensor: torch.Tensor, address: int) -> Result:
    return Result(values=tensor.tolist(), dtype=str(tensor.dtype), is_in_place=tensor.data_ptr() == address)


def _reduce(
    context: RankContext, hooks: Hooks, name: str, dtype: torch.dtype, parameter_type: torch.dtype
) -> list[Result]:
    """Reduce one gradient whole and one into shards."""
    state = hooks.LowPrecisionState(_group(), parameter_type)
    whole = _gradient(context.rank, dtype)
    output = torch.full((SIZE // context.size,), float("nan"), dtype=dtype)
    addresses = [whole.data_ptr(), output.data_ptr()]
    _call(hooks, name, state, whole)
    _call(hooks, name, state, _gradient(context.rank, dtype), output)
    return [_result(tensor, address) for tensor, address in zip((whole, output), addresses, strict=True)]


def _call(hooks: Hooks, name: str, state: Any, *tensors: torch.Tensor) -> None:
    try:
        assert getattr(hooks, name)(state, *tensors) is None
    except RuntimeError as error:
        # torch 2.13 has the result in place by then, and needs a stream, which the CPU lacks.
        if hooks is not default_hooks or "unknown parameter type" not in str(error):
            raise


def _reduce_by_both(context: RankContext, name: str, dtype: torch.dtype, parameter_type: torch.dtype) -> Any:
    return [_reduce(context, hooks, name, dtype, parameter_type) for hooks in (comm_hooks, default_hooks)]


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("size", SIZES)
def test_results_are_bitwise_those_of_torch(name: str, size: int, ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.float64, LOW[name]):
        both = ranks.run(size, _reduce_by_both, name, dtype, torch.float32)
        for mine, theirs in both:
            assert [(r.values, r.dtype) for r in mine] == [(r.values, r.dtype) for r in theirs]
            assert all(r.is_in_place for r in mine if r.dtype == str(dtype))


@pytest.mark.parametrize("name", LOW)
def test_results_of_low_precision_get_the_dtype_of_the_parameters(name: str, ranks: Ranks) -> None:
    for original in (torch.float32, LOW[name]):
        for wanted in (torch.float32, torch.float64, LOW[name]):
            for results in ranks.run(2, _reduce_here, name, original, wanted):
                assert [r.dtype for r in results] == [str(wanted)] * 2
                assert all(r.is_in_place == (original == wanted) for r in results)


def _reduce_here(context: RankContext, name: str, dtype: torch.dtype, wanted: torch.dtype) -> list[Result]:
    return _reduce(context, comm_hooks, name, dtype, wanted)


def _wire(context: RankContext, name: str) -> list[tuple[str, str]]:
    state = comm_hooks.LowPrecisionState(_group())
    hook = getattr(comm_hooks, name)
    hook(state, _gradient(context.rank))
    hook(state, _gradient(context.rank), torch.empty(SIZE // context.size))
    return [(str(entry.op), entry.dtype) for entry in context.recorder.ledger()]


@pytest.mark.parametrize("name", LOW)
def test_ranks_exchange_low_precision(name: str, ranks: Ranks) -> None:
    dtype = str(LOW[name]).removeprefix("torch.")
    expected = [(str(Op.ALL_REDUCE), dtype), (str(Op.REDUCE_SCATTER), dtype)]
    assert ranks.run(2, _wire, name) == [expected] * 2


def _large_values(context: RankContext) -> list[float]:
    gradient = torch.tensor([40000.0])
    comm_hooks.fp16_compress_hook(comm_hooks.LowPrecisionState(_group()), gradient)
    return gradient.tolist()


def test_sums_beyond_the_range_of_float16_do_not_overflow(ranks: Ranks) -> None:
    assert ranks.run(2, _large_values) == [[40000.0], [40000.0]]
