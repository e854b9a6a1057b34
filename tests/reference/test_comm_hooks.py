"""Hooks leave the mean over ranks, in the dtype and the tensor that it belongs in, as torch's own do."""

from __future__ import annotations

from collections.abc import Callable
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


# --- factors ------------------------------------------------------------------------------------------------------


def _factors(context: RankContext) -> list[tuple[float, float, int]]:
    states = [make.DefaultState(_group()) for make in (comm_hooks, default_hooks)]
    return [(s.gradient_predivide_factor, s.gradient_postdivide_factor, s.world_size) for s in states]


@pytest.mark.parametrize("size", SIZES)
def test_factors_are_those_of_torch(size: int, ranks: Ranks) -> None:
    for mine, theirs in ranks.run(size, _factors):
        assert mine == theirs
        assert mine[0] * mine[1] == size == mine[2]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 12, 16, 64, 1000, 4096])
def test_first_factor_is_exact_and_near_the_root(size: int) -> None:
    found = comm_hooks._power_of_two_near_root(size)
    assert found == default_hooks.DefaultState._get_gradient_predivide_factor(size)
    assert found.hex().startswith("0x1.0000000000000p")


@pytest.mark.parametrize("state", [comm_hooks.DefaultState, comm_hooks.LowPrecisionState])
def test_state_without_a_group_is_refused(state: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match="expected to pass in an explicit ProcessGroup, got None"):
        state(None)


# --- results ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one rank was left with: values, dtype, and whether the memory is that of the tensor it gave."""

    values: list[float]
    dtype: str
    is_in_place: bool


def _result(tensor: torch.Tensor, address: int) -> Result:
    return Result(values=tensor.tolist(), dtype=str(tensor.dtype), is_in_place=tensor.data_ptr() == address)


def _reduce(
    context: RankContext, hooks: Hooks, name: str, dtype: torch.dtype, parameter_type: torch.dtype
) -> list[Result]:
    """Reduce one gradient whole and one into shards."""
    low = name in LOW
    state = hooks.LowPrecisionState(_group(), parameter_type) if low else hooks.DefaultState(_group())
    found = []
    if name != "reduce_scatter_hook":
        whole = _gradient(context.rank, dtype)
        address = whole.data_ptr()
        _call(hooks, name, state, whole)
        found.append(_result(whole, address))
    if name != "allreduce_hook":
        output = torch.full((SIZE // context.size,), float("nan"), dtype=dtype)
        address = output.data_ptr()
        _call(hooks, name, state, _gradient(context.rank, dtype), output)
        found.append(_result(output, address))
    return found


def _call(hooks: Hooks, name: str, state: Any, *tensors: torch.Tensor) -> None:
    try:
        assert getattr(hooks, name)(state, *tensors) is None
    except RuntimeError as error:
        # torch 2.13 has the result in place by then, and asks for a stream that the CPU has none of.
        if hooks is not default_hooks or name not in LOW or "unknown parameter type" not in str(error):
            raise


def _reduce_by_both(context: RankContext, name: str, dtype: torch.dtype, parameter_type: torch.dtype) -> Any:
    return [_reduce(context, hooks, name, dtype, parameter_type) for hooks in (comm_hooks, default_hooks)]


@pytest.mark.parametrize("name", ["allreduce_hook", "reduce_scatter_hook", *LOW])
@pytest.mark.parametrize("size", SIZES)
def test_results_are_bitwise_those_of_torch(name: str, size: int, ranks: Ranks) -> None:
    for dtype in {torch.float32, torch.float64, LOW.get(name, torch.float32)}:
        both = ranks.run(size, _reduce_by_both, name, dtype, torch.float32)
        for mine, theirs in both:
            assert [(r.values, r.dtype) for r in mine] == [(r.values, r.dtype) for r in theirs]
            assert all(r.is_in_place for r in mine if r.dtype == str(dtype))


@pytest.mark.parametrize("name", LOW)
def test_results_of_low_precision_get_the_dtype_of_the_parameters(name: str, ranks: Ranks) -> None:
    for given in (torch.float32, LOW[name]):
        for wanted in (torch.float32, torch.float64, LOW[name]):
            for results in ranks.run(2, _reduce_here, name, given, wanted):
                assert [r.dtype for r in results] == [str(wanted)] * 2
                assert all(r.is_in_place == (given == wanted) for r in results)


def _reduce_here(context: RankContext, name: str, dtype: torch.dtype, wanted: torch.dtype) -> list[Result]:
    return _reduce(context, comm_hooks, name, dtype, wanted)


def _wire(context: RankContext, name: str) -> list[tuple[str, str]]:
    state = comm_hooks.LowPrecisionState(_group())
    hook = getattr(comm_hooks, name)
    hook(state, _gradient(context.rank))
    hook(state, _gradient(context.rank), torch.empty(SIZE // context.size))
    return [(str(entry.op), entry.dtype) for entry in context.recorder.ledger()]


@pytest.mark.parametrize("name", LOW)
def test_low_precision_is_what_crosses_between_ranks(name: str, ranks: Ranks) -> None:
    dtype = str(LOW[name]).removeprefix("torch.")
    expected = [(str(Op.ALL_REDUCE), dtype), (str(Op.REDUCE_SCATTER), dtype)]
    assert ranks.run(2, _wire, name) == [expected] * 2


def _custom_factors(context: RankContext) -> list[float]:
    state = comm_hooks.DefaultState(_group())
    state.gradient_predivide_factor, state.gradient_postdivide_factor = 1.0, 4.0
    gradient = torch.tensor([2.0 + context.rank])
    comm_hooks.allreduce_hook(state, gradient)
    return gradient.tolist()


def test_factors_set_by_the_caller_hold(ranks: Ranks) -> None:
    assert ranks.run(2, _custom_factors) == [[1.25], [1.25]]


def _large_values(context: RankContext) -> list[float]:
    gradient = torch.tensor([40000.0])
    comm_hooks.fp16_compress_hook(comm_hooks.LowPrecisionState(_group()), gradient)
    return gradient.tolist()


def test_sums_beyond_the_range_of_float16_do_not_overflow(ranks: Ranks) -> None:
    assert ranks.run(2, _large_values) == [[40000.0], [40000.0]]
