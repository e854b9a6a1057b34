"""Low-precision hooks leave the mean over ranks in the dtype and the tensor of torch's hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks

from shardproof.engine.reference.fsdp1 import comm_hooks
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.worlds.rank import RankContext
from tests.reference.ranks import Ranks

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
