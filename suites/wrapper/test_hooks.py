"""Communication hooks: their arguments, how often they are called, the effect, and which modules accept one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL, Op
from shardproof.suites.params import parametrize
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import LR, UNITS, gradients, shown_gradients, tower
from shardproof.suites.wrapper.wrapping import strategies
from shardproof.suites.tower import trained_alone

pytestmark = pytest.mark.api("register_comm_hook")
FULL, KEEP, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HOOKED = (
    "calls while gradients accumulate",
    "sums of what it was given",
    "its form",
    "parameters afterwards",
)
# Each unit's own parameters, by the beginnings of their names.
_OWNED = (("stem", "head"), ("middle.0",), ("middle.1",))


class _Diary:
    """The state of a hook: the arguments of its calls."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.forms: list[tuple[int, ...]] = []  # dims of the gradient, and of the output if there is one

    def write(self, gradient: torch.Tensor, *output: torch.Tensor) -> None:
        """Record one call."""
        self.sums.append(float(gradient.sum()))
        self.forms.append((gradient.dim(), *(o.dim() for o in output)))


def _ignore(*_: object) -> None:
    """Do nothing, as a hook."""


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("TakesAnyHook")
@expects("what cannot be called", "a hook of a unit", "a second hook", "a hook of replicas")
def test_refuses_what_is_no_hook_or_one_too_many(bench: Bench) -> None:
    root = bench.wrapped(tower())
    root.check_is_root()
    bench.refuses("what cannot be called", lambda: root.register_comm_hook(None, "no hook"), ValueError)
    unit = root.middle
    bench.refuses("a hook of a unit", lambda: unit.register_comm_hook(None, _ignore), AssertionError)
    root.register_comm_hook(None, _ignore)
    bench.refuses("a second hook", lambda: root.register_comm_hook(None, _ignore), AssertionError)
    hybrid = bench.wrapped(
        tower(), device_mesh=bench.mesh(1), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    bench.refuses("a hook of replicas", lambda: hybrid.register_comm_hook(None, _ignore), AssertionError)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("CallsHooksOfReplicasAlone", "CallsHooksTwice")
@expects(*HOOKED, "a share of the gradient")
def test_calls_a_hook_with_each_gradient_once_and_where_its_share_goes(bench: Bench) -> None:
    def sum_by_hand(state: _Diary, gradient: torch.Tensor, output: torch.Tensor) -> None:
        state.write(gradient, output)
        bench.same("a share of the gradient", output.numel() * bench.size, gradient.numel())
        total = gradient.clone()
        distributed.all_reduce(total)
        output.copy_(total.chunk(bench.size)[bench.rank] / bench.size)

    diary, root = _Diary(), bench.wrapped(tower())
    root.register_comm_hook(diary, sum_by_hand)
    _train_with(bench, root, diary, form=(1, 1))


@pytest.mark.kills("CallsHooksTwice")
@expects(*HOOKED)
def test_calls_a_hook_of_replicas_with_each_gradient_once(bench: Bench) -> None:
    def sum_by_hand(state: _Diary, gradient: torch.Tensor) -> None:
        state.write(gradient)
        distributed.all_reduce(gradient)
        gradient.div_(bench.size)

    diary, root = _Diary(), bench.wrapped(tower(), sharding_strategy=WHOLE)
    root.register_comm_hook(diary, sum_by_hand)
    _train_with(bench, root, diary, form=(1,))


# Any: engines have no common base class.
def _train_with(bench: Bench, root: Any, diary: _Diary, *, form: tuple[int, ...]) -> None:
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    with root.no_sync():
        bench.train(root, step=1)
    bench.same("calls while gradients accumulate", len(diary.sums), 0)
    optimizer.zero_grad()
    bench.train(root)
    bench.same("sums of what it was given", sorted(diary.sums), sorted(_own_sums(bench)))
    bench.same("its form", diary.forms, [form] * (1 + len(UNITS)))
    optimizer.step()
    bench.same("parameters afterwards", bench.summoned(root), trained_alone(bench.ranks))


def _own_sums(bench: Bench) -> list[float]:
    """Sum each unit's gradients of only this rank's rows."""
    alone = tower()
    bench.train(alone)
    sums = {name: float(gradient.sum()) for name, gradient in shown_gradients(alone).items()}
    return [sum(value for name, value in sums.items() if name.startswith(owned)) for owned in _OWNED]


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("GivesHooksCopies")
@strategies(FULL, KEEP, WHOLE)
@expects("parameters afterwards")
def test_trains_alike_with_the_hook_that_is_the_default(bench: Bench, strategy: ShardingStrategy) -> None:
    root = bench.wrapped(tower(), sharding_strategy=strategy)
    hook = bench.names.allreduce_hook if strategy is WHOLE else bench.names.reduce_scatter_hook
    root.register_comm_hook(bench.names.DefaultState(distributed.group.WORLD), hook)
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    bench.train(root)
    optimizer.step()
    bench.same("parameters afterwards", bench.summoned(root), trained_alone(bench.ranks))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("CompressesNothing")
@strategies(FULL, WHOLE)
@parametrize("dtype", torch.bfloat16, torch.float16)
@expects("what crossed", "gradients that are kept", "gradients")
def test_compresses_gradients_within_rounding(
    bench: Bench, dtype: torch.dtype, strategy: ShardingStrategy
) -> None:
    names = bench.names
    hook = names.bf16_compress_hook if dtype is torch.bfloat16 else names.fp16_compress_hook
    root = bench.wrapped(tower(), sharding_strategy=strategy)
    root.register_comm_hook(names.LowPrecisionState(distributed.group.WORLD), hook)
    # Steps of one: the change of the parameters is the gradient. And powers of two: their own rounding is far below.
    optimizer = torch.optim.SGD(root.parameters(), lr=1.0)
    already = len(bench.ledger())
    bench.train(root)
    crossed = {e.dtype for e in bench.ledger()[already:] if e.op in {Op.ALL_REDUCE, Op.REDUCE_SCATTER}}
    bench.same("what crossed", crossed, {str(dtype).removeprefix("torch.")})
    kept = {p.grad.dtype for p in root.parameters() if p.grad is not None}
    bench.same("gradients that are kept", kept - {torch.float32}, set())
    optimizer.step()
    before, after = dict(tower().named_parameters()), bench.summoned(root)
    got = {name: before[name].detach() - value for name, value in after.items()}
    # Each rank's share is rounded once, and each of the sums of ranks once more: half an eps of the largest each.
    tolerance = torch.finfo(dtype).eps * (1 + bench.size)
    bench.near("gradients", got, gradients(tower(), bench.ranks), tolerance=tolerance)
