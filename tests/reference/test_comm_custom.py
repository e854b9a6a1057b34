"""The engine calls collectives and hooks of the user with the data of the wire, and uses their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.tracing.ledger import Op, Phase
from shardproof.harness.worlds.rank import RankContext
from tests.reference.models import (
    BY_NAME,
    WIDTH,
    Chain,
    apply_to,
    assert_gradients,
    chain_gradients,
    each_api,
    hybrid_mesh,
    train,
    whole_units,
)
from tests.reference.ranks import Ranks, collectives

SIZE = 4
UNIT = 1  # the unit with the collectives of the user
NUMEL = WIDTH * WIDTH + 4 * (UNIT + 1)  # of its parameters, whose rows the world divides
Call = tuple[str, object]


class _Allocates:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.calls.append(("allocate", torch.Size(size).numel()))
        return torch.empty(size, dtype=dtype, device=device)


class Gather(_Allocates):
    """An all-gather of the user's, which records its calls."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self.calls.append(("gather", (input_tensor.numel(), output_tensor.numel(), group.size())))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(_Allocates):
    """A reduce-scatter of the user's, which doubles, so that its effect shows."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.calls.append(("scatter", (input_tensor.numel(), output_tensor.numel(), str(input_tensor.dtype))))
        input_tensor.mul_(2)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _doubled(times: int = 1) -> dict[str, torch.Tensor]:
    """Compute the gradients of this number of microbatches, twice as large in the unit."""
    plain = chain_gradients(SIZE, factor=times)
    return {name: g * (2 if name.startswith(f"units.{UNIT}.") else 1) for name, g in plain.items()}


def _train_with_custom(context: RankContext, api: str) -> tuple[list[Call], list[Call], dict[Op, int]]:
    chain, gather, scatter = Chain(), Gather(), Scatter()
    model = apply_to(chain, BY_NAME[api].fully_shard)
    model.units[UNIT].set_custom_all_gather(gather)
    model.units[UNIT].set_custom_reduce_scatter(scatter)
    train(context, model)
    assert_gradients(chain, _doubled())
    assert not whole_units(chain)
    return gather.calls, scatter.calls, collectives(context, Phase.BACKWARD)


@each_api
def test_custom_collectives_carry_one_unit(api: str, ranks: Ranks) -> None:
    shard = NUMEL // SIZE
    for gathers, scatters, backward in ranks.run(SIZE, _train_with_custom, api):
        once = [("allocate", NUMEL), ("gather", (shard, NUMEL, SIZE))]
        assert gathers == once * 2, "once in forward, once in backward"
        assert set(scatters[:-1]) == {("allocate", NUMEL), ("allocate", shard)}
        assert scatters[-1] == ("scatter", (NUMEL, shard, "torch.float32"))
        assert backward == {Op.ALL_GATHER: 3, Op.REDUCE_SCATTER: 4}


def _train_from_group(context: RankContext, api: str) -> None:
    chain = Chain()
    model = apply_to(chain, BY_NAME[api].fully_shard)
    for enable in (True, True, False, True):
        model.units[UNIT].set_allocate_memory_from_process_group_for_comm(enable)
    train(context, model)
    assert_gradients(chain, chain_gradients(SIZE))
    model.units[0].set_custom_all_gather(Gather())
    with pytest.raises(AssertionError, match="custom"):
        model.units[0].set_allocate_memory_from_process_group_for_comm(True)


@each_api
def test_buffers_may_come_from_the_group(api: str, ranks: Ranks) -> None:
    ranks.run(SIZE, _train_from_group, api)


def _train_with_hook(context: RankContext, api_name: str, layout: str) -> tuple[list[int], list[int]]:
    api, chain, numels, num_sums = BY_NAME[api_name], Chain(), list[int](), list[int]()

    def double(reduced: torch.Tensor) -> None:
        numels.append(reduced.numel())
        num_sums.append(collectives(context, Phase.BACKWARD).get(Op.ALL_REDUCE, 0))
        reduced.mul_(2)

    if layout == "replicas":
        model = apply_to(chain, api.replicate)
    else:
        model = apply_to(chain, api.fully_shard, mesh=hybrid_mesh(2, 2) if layout == "hybrid" else None)
    model.units[UNIT].set_all_reduce_hook(double)
    for reduces in (False, True):
        model.set_requires_gradient_sync(reduces)
        train(context, model)
    assert_gradients(chain, _doubled(times=2))
    return numels, num_sums


@each_api
@pytest.mark.parametrize(
    ("layout", "num_shards", "num_all_reduces"), [("flat", 4, 0), ("hybrid", 2, 2), ("replicas", 1, 2)]
)
def test_a_hook_sees_the_reduced_shard_once_and_may_change_it(
    layout: str, num_shards: int, num_all_reduces: int, api: str, ranks: Ranks
) -> None:
    for numels, num_sums in ranks.run(SIZE, _train_with_hook, api, layout):
        assert numels == [NUMEL // num_shards]
        # Unit 2 and the hook's own are all-reduced by then; more may be, where reductions overlap.
        assert num_sums[0] >= num_all_reduces


def _separate_groups(context: RankContext, api: str, hybrid: bool) -> list[int]:
    """Count the numbers that reductions and gathers have in common: a group numbers all its collectives."""
    mesh = hybrid_mesh(2, 2) if hybrid else None
    model = apply_to(Chain(), BY_NAME[api].fully_shard, mesh=mesh)
    counts = []
    for step, enable in enumerate((True, False)):
        model.zero_grad()
        model.set_separate_reduce_scatter_group(enable)
        train(context, model, step=step)
        assert_gradients(model, chain_gradients(SIZE))
        entries = [e for e in context.recorder.ledger() if e.step == step]
        scatters = {e.group_seq for e in entries if e.op is Op.REDUCE_SCATTER}
        counts.append(len(scatters & {e.group_seq for e in entries if e.op is Op.ALL_GATHER}))
        assert len(scatters) == 4
    return counts


@each_api
@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_reductions_may_have_a_group_of_their_own(hybrid: bool, api: str, ranks: Ranks) -> None:
    if not hasattr(BY_NAME[api].sharded_module, "set_separate_reduce_scatter_group"):
        pytest.skip(f"{api} leaves set_separate_reduce_scatter_group out")
    for apart, together in ranks.run(SIZE, _separate_groups, api, hybrid):
        assert apart > 0, "two groups count each for itself, so numbers repeat"
        assert together == 0, "one group numbers all"
