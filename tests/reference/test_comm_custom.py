"""Collectives and hooks that the user brings: called with what the wire carries, and believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.tracing.ledger import Op, Phase
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    ROOT,
    Watch,
    assert_gradients,
    both_doors,
    count,
    doors_with,
    hybrid_mesh,
    padded_numel,
    plain_gradients,
    replicate_chain,
    run,
    shapes_of,
    shard_chain,
)

SIZE = 4
UNIT = 1  # the unit that gets what the user brings
Call = tuple[str, object]


class Gather:
    """An all-gather of the user's, which writes down how it is called."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give memory."""
        self.calls.append(("allocate", torch.Size(size).numel()))
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather as ever."""
        self.calls.append(("gather", (input_tensor.numel(), output_tensor.numel(), group.size())))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter:
    """A reduce-scatter of the user's, which doubles, so that its effect shows."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give memory."""
        self.calls.append(("allocate", torch.Size(size).numel()))
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce twice as much."""
        self.calls.append(("scatter", (input_tensor.numel(), output_tensor.numel(), str(input_tensor.dtype))))
        input_tensor.mul_(2)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _doubled(factor: float, size: int) -> dict[str, torch.Tensor]:
    plain = plain_gradients(size)
    return {name: g * (factor if name.startswith(f"units.{UNIT}.") else 1) for name, g in plain.items()}


def _numel(size: int = SIZE, unit: int = UNIT) -> int:
    return padded_numel(shapes_of(unit), size)


def _train_with_custom(context: RankContext, door: str, async_op: bool) -> tuple[list[Call], list[Call], Any]:
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain)
    gather, scatter = Gather(), Scatter()
    unit: Any = watch.chain.units[UNIT]
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(scatter)
    if async_op:
        model._set_unshard_async_op(True)
    watch.train()
    assert_gradients(watch.chain, _doubled(2, SIZE))
    seen = watch.seen()
    assert not seen.left_whole
    return gather.calls, scatter.calls, count(seen.entries, Phase.BACKWARD)


@both_doors
def test_custom_collectives_carry_one_unit(door: str, tmp_path: Path) -> None:
    _judge_custom(run(tmp_path, SIZE, _train_with_custom, door, False))


@doors_with("_set_unshard_async_op")
def test_custom_collectives_may_be_async(door: str, tmp_path: Path) -> None:
    _judge_custom(run(tmp_path, SIZE, _train_with_custom, door, True))


def _judge_custom(told: list[Any]) -> None:
    whole, shard = _numel(), _numel() // SIZE
    for gathers, scatters, backward in told:
        once = [("allocate", whole), ("gather", (shard, whole, SIZE))]
        assert gathers == once * 2, "once in forward, once in backward"
        assert set(scatters[:-1]) == {("allocate", whole), ("allocate", shard)}
        assert scatters[-1] == ("scatter", (whole, shard, "torch.float32"))
        assert backward == {Op.ALL_GATHER: 3, Op.REDUCE_SCATTER: 4}


def _train_with_hook(context: RankContext, door: str, layout: str) -> tuple[list[int], list[int]]:
    watch, numels, at_reduction = Watch(context), [], []

    def double(reduced: torch.Tensor) -> None:
        numels.append(reduced.numel())
        talk = [e for e in context.recorder.ledger() if e.phase is Phase.BACKWARD]
        at_reduction.append(sum(e.op is Op.ALL_REDUCE for e in talk))
        reduced.mul_(2)

    if layout == "replicas":
        model = replicate_chain(BY_NAME[door], watch.chain)
    else:
        mesh = hybrid_mesh(2, 2) if layout == "hybrid" else None
        model = shard_chain(BY_NAME[door], watch.chain, mesh=mesh)
    unit: Any = watch.chain.units[UNIT]
    unit.set_all_reduce_hook(double)
    for microbatch in range(2):
        model.set_requires_gradient_sync(microbatch == 1)
        watch.train(microbatch=microbatch)
    gradients = {name: 2 * g for name, g in _doubled(2, SIZE).items()}
    assert_gradients(watch.chain, gradients)
    return numels, at_reduction


@both_doors
@pytest.mark.parametrize(
    ("layout", "num_shards", "num_all_reduces"), [("flat", 4, 0), ("hybrid", 2, 2), ("replicas", 1, 2)]
)
def test_a_hook_sees_the_reduced_shard_once_and_may_change_it(
    door: str, layout: str, num_shards: int, num_all_reduces: int, tmp_path: Path
) -> None:
    for numels, at_reduction in run(tmp_path, SIZE, _train_with_hook, door, layout):
        assert numels == [_numel(num_shards) // num_shards]
        # Unit 2 and the hook's own are all-reduced by then; more may be, where reductions overlap.
        assert at_reduction[0] >= num_all_reduces


def _hybrid_by_hook(context: RankContext, door: str) -> None:
    """Shard over half of the world and let hooks average over the other half."""
    watch, mesh = Watch(context), hybrid_mesh(2, 2)
    shard_chain(BY_NAME[door], watch.chain, mesh=mesh["shard"])
    modules: list[Any] = [watch.chain, *watch.chain.units]
    group = mesh.get_group("replicate")
    for module in modules:
        module.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced, dist.ReduceOp.AVG, group))
    watch.train()
    assert_gradients(watch.chain, plain_gradients(SIZE))


@both_doors
def test_a_hook_makes_hybrid_sharding_by_hand(door: str, tmp_path: Path) -> None:
    run(tmp_path, SIZE, _hybrid_by_hook, door)


def _separate_groups(context: RankContext, door: str, hybrid: bool) -> tuple[list[int], list[int]]:
    """Give how often each reduction and gather used its group before: shared groups count together."""
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain, mesh=hybrid_mesh(2, 2) if hybrid else None)
    counts = []
    for step, enable in enumerate((True, False)):
        model.zero_grad()
        model.set_separate_reduce_scatter_group(enable)
        watch.train(step=step)
        assert_gradients(watch.chain, plain_gradients(SIZE))
        entries = [e for e in watch.seen().entries if e.step == step]
        scatters = {e.group_seq for e in entries if e.op is Op.REDUCE_SCATTER}
        gathers = {e.group_seq for e in entries if e.op is Op.ALL_GATHER}
        counts.append(len(scatters & gathers))
        assert len(scatters) == 4
    return counts[:1], counts[1:]


@doors_with("set_separate_reduce_scatter_group")
@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_reductions_may_have_a_group_of_their_own(door: str, hybrid: bool, tmp_path: Path) -> None:
    for apart, together in run(tmp_path, SIZE, _separate_groups, door, hybrid):
        assert apart[0] > 0, "two groups count each for itself, so numbers repeat"
        assert together == [0], "one group numbers all"


def _unused(context: RankContext, door: str, told: bool) -> dict[str, Any]:
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain)
    model.set_reduce_scatter_unused_params(told)
    watch.chain.units[UNIT].extra.requires_grad_(True)
    used: Any = watch.chain.units[UNIT]
    numel = used.extra.numel()
    used.forward = lambda inputs: inputs @ used.weight  # `extra` takes no part
    watch.train()
    scatters = [
        e.num_bytes // 4
        for e in watch.seen().entries
        if e.op is Op.REDUCE_SCATTER and e.phase is Phase.BACKWARD
    ]
    grad = used.extra.grad
    zeros = None if grad is None else bool((grad.full_tensor() == 0).all())
    return {"numel": numel, "scatters": sorted(scatters), "zeros": zeros}


@both_doors
@pytest.mark.parametrize("told", [False, True])
def test_unused_parameters_travel_as_zeros_if_asked(door: str, told: bool, tmp_path: Path) -> None:
    others = [_numel(unit=u) for u in (ROOT, 0, 2)]
    for observed in run(tmp_path, SIZE, _unused, door, told):
        unit = _numel() if told else 64
        assert observed["scatters"] == sorted([*others, unit])
        assert observed["zeros"] is (True if told else None)


def _rank_dependent(context: RankContext, door: str) -> None:
    """Let each rank use another parameter of one group: without zeros the collectives would not match."""
    watch = Watch(context)
    unit: Any = watch.chain.units[UNIT]
    rank = context.rank
    unit.forward = lambda x: x @ unit.weight if rank % 2 else x + unit.extra.sum()
    model = shard_chain(BY_NAME[door], watch.chain)
    model.set_reduce_scatter_unused_params(True)
    watch.train()
    assert all(param.grad is not None for param in model.parameters())
    expected = [torch.zeros(shape) for shape in shapes_of(UNIT)]
    for name, value in (("weight", expected[0]), ("extra", expected[1])):
        assert not torch.equal(getattr(unit, name).grad.full_tensor(), value), name


@both_doors
def test_ranks_may_use_different_parameters_if_zeros_travel(door: str, tmp_path: Path) -> None:
    run(tmp_path, 2, _rank_dependent, door)
