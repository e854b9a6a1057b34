"""The in-memory transport alone: threads call it, without process groups and operators."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.harness.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    CollectiveTimeoutError,
    DeadlockError,
    WorldAbandonedError,
)
from shardproof.harness.tracing.collectives.call import Pieces
from shardproof.harness.tracing.collectives.call_site import call_site
from shardproof.harness.tracing.current_rank import bind_rank
from shardproof.harness.tracing.ledger import Op, ViolationKind
from shardproof.harness.worlds.threads.transport import InMemoryTransport
from tests.ledgers import made_call

# Any: RedOpType's stub has no members.
RedOp: Any = dist.ReduceOp.RedOpType
Tensor = torch.Tensor

# Far beyond the duration of any test; a thread that is alive after it hangs.
_HANG_S = 20.0


class Rank:
    """One rank's end of a transport, with short names for calls."""

    def __init__(self, transport: InMemoryTransport, rank: int, size: int) -> None:
        self.transport = transport
        self.rank = rank
        self.size = size

    def call(self, op: Op, inputs: Pieces = (), outputs: Pieces = (), **fields: Any) -> dist.Work:
        callback = {"on_violation": fields.pop("on_violation")} if "on_violation" in fields else {}
        fields = {"ranks": tuple(range(self.size)), "site": call_site(), **fields}
        fields["rank"] = fields["ranks"].index(self.rank)
        return self.transport.start(made_call(op, inputs, outputs, **fields), **callback)

    def all_reduce(self, tensor: Tensor, reduce_op: Any = RedOp.SUM, **fields: Any) -> dist.Work:
        return self.call(Op.ALL_REDUCE, ((tensor,),), ((tensor,),), reduce_op=reduce_op, **fields)

    def all_gather(self, pieces: tuple[Tensor, ...], tensor: Tensor, **fields: Any) -> dist.Work:
        return self.call(Op.ALL_GATHER, ((tensor,),), (pieces,), **fields)

    def reduce_scatter(self, tensor: Tensor, pieces: tuple[Tensor, ...], **fields: Any) -> dist.Work:
        fields = {"reduce_op": RedOp.SUM, **fields}
        return self.call(Op.REDUCE_SCATTER, (pieces,), ((tensor,),), **fields)

    def broadcast(self, tensor: Tensor, root: int, **fields: Any) -> dist.Work:
        inputs = (tensor,) if self.rank == root else ()
        return self.call(Op.BROADCAST, (inputs,), ((tensor,),), peer=root, **fields)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work:
        return self.call(Op.SEND, ((tensor,),), ((),), peer=to, tag=tag, is_async=True)

    def recv(self, tensor: Tensor, source: int | None, tag: int = 0) -> dist.Work:
        return self.call(Op.RECV, ((),), ((tensor,),), peer=source, tag=tag, is_async=True)

    def barrier(self, **fields: Any) -> dist.Work:
        return self.call(Op.BARRIER, **fields)


Body = Callable[[Rank], Any]


def outcomes(size: int, body: Body, transport: InMemoryTransport | None = None) -> list[Any]:
    """Run ``body`` on each rank's thread; return its values or errors, in rank order."""
    transport = transport or InMemoryTransport(size)
    results: list[Any] = [None] * size

    def live(rank: int) -> None:
        bind_rank(rank)
        try:
            results[rank] = body(Rank(transport, rank, size))
            transport.leave(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_HANG_S)
    assert not any(t.is_alive() for t in threads), "a rank hangs in the transport"
    return results


def returned(size: int, body: Body) -> list[Any]:
    """Like `outcomes`, for bodies that must not raise."""
    results = outcomes(size, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 1)


# ---- results


def test_averages_floating_point_and_refuses_to_average_integers() -> None:
    def body(me: Rank) -> list[float]:
        tensor = numbers(me.rank, 2)
        me.all_reduce(tensor, RedOp.AVG)
        return cast(list[float], tensor.tolist())

    assert returned(3, body) == [[2.0, 4.0]] * 3
    refusals = outcomes(2, lambda me: me.all_reduce(torch.ones(1, dtype=torch.int64), RedOp.AVG))
    assert [type(r) for r in refusals] == [CollectiveRefusedError] * 2
    assert "AVG of torch.int64" in str(refusals[0])


def test_refuses_premultiplied_sums_and_bitwise_ops_on_floats() -> None:
    for op in (RedOp.PREMUL_SUM, RedOp.BAND):
        (refusal,) = outcomes(1, lambda me, op=op: me.all_reduce(torch.ones(1), op))  # type: ignore[misc]  # lambda
        assert isinstance(refusal, CollectiveRefusedError)
        assert op.name in str(refusal)


def test_accumulates_in_rank_order_on_every_rank() -> None:
    # In float32 only (1e8 - 1e8) + 1 is 1: any other order loses the one.
    for parts, expected in (([1e8, -1e8, 1.0], 1.0), ([1e8, 1.0, -1e8], 0.0), ([1.0, 1e8, -1e8], 0.0)):

        def body(me: Rank, parts: list[float] = parts) -> float:
            tensor = torch.tensor(parts[me.rank])
            me.all_reduce(tensor)
            return tensor.item()

        assert returned(3, body) == [expected] * 3


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_reduce_scatter_into_its_own_input_is_right(is_async: bool) -> None:
    def body(me: Rank) -> list[float]:
        buffer = torch.arange(6.0) + 10 * me.rank
        pieces = buffer.tensor_split(3)
        me.reduce_scatter(pieces[me.rank], pieces, is_async=is_async).wait()
        return cast(list[float], pieces[me.rank].tolist())

    # Sum over ranks of (k + 10 r) is 3 k + 30.
    assert returned(3, body) == [[30.0, 33.0], [36.0, 39.0], [42.0, 45.0]]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_all_gather_into_its_own_output_is_right(is_async: bool) -> None:
    def body(me: Rank) -> list[float]:
        buffer = torch.full((6,), -1.0)
        pieces = buffer.tensor_split(3)
        pieces[me.rank].fill_(me.rank)
        me.all_gather(pieces, pieces[me.rank], is_async=is_async).wait()
        return cast(list[float], buffer.tolist())

    assert returned(3, body) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3


def test_coalesced_tensors_of_any_layout_are_carried() -> None:
    def body(me: Rank) -> list[Any]:
        strided = torch.zeros(2, 3).t()
        strided += me.rank + 1
        empty = torch.zeros(0)
        flags = torch.tensor([me.rank == 1, False])
        low = torch.tensor([me.rank + 1], dtype=torch.bfloat16)
        tensors = (strided, empty, low)
        each = tuple((t,) for t in tensors)
        me.call(Op.ALL_REDUCE, each, each, reduce_op=RedOp.SUM)
        me.all_reduce(flags, RedOp.MAX)
        return [t.tolist() for t in (*tensors, flags)]

    assert returned(2, body) == [[[[3.0, 3.0]] * 3, [], [3.0], [True, False]]] * 2


def test_sixty_four_ranks_meet() -> None:
    def body(me: Rank) -> float:
        me.barrier()
        tensor = torch.tensor(float(me.rank))
        me.all_reduce(tensor)
        return tensor.item()

    assert returned(64, body) == [sum(range(64))] * 64


def test_groups_of_equal_names_and_other_ranks_are_apart() -> None:
    def body(me: Rank) -> float:
        tensor = torch.tensor(1.0 + me.rank)
        pair = (0, 1) if me.rank < 2 else (2, 3)
        me.all_reduce(tensor, ranks=pair)
        return tensor.item()

    assert returned(4, body) == [3.0, 3.0, 7.0, 7.0]


# ---- lateness


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.int8], ids=str
)
def test_an_asynchronous_result_is_garbage_until_waited_for(dtype: torch.dtype) -> None:
    def body(me: Rank) -> tuple[Tensor, Tensor]:
        tensor = torch.ones(3, dtype=dtype)
        work = me.all_reduce(tensor, is_async=True)
        me.barrier()  # the data is there: only the wait is missing
        early = tensor.clone()
        work.wait()
        return early, tensor

    for early, late in returned(2, body):
        assert late.tolist() == [2] * 3
        assert all(x != x or x < 0 or x > 100 for x in early.tolist() if not isinstance(x, complex))
        assert not bool((early == late).any())
        assert not bool((early == 1).any())


def test_a_result_without_a_wait_stays_garbage() -> None:
    def body(me: Rank) -> bool:
        tensor = torch.ones(2)
        work = me.all_reduce(tensor, is_async=True)
        me.barrier()
        return bool(tensor.isnan().all()) and work is not None

    assert returned(2, body) == [True, True]


def test_memory_that_stays_legal_to_read_is_not_poisoned() -> None:
    def body(me: Rank) -> list[bool]:
        tensor = torch.ones(2)
        spread = me.broadcast(tensor, root=0, is_async=True)
        pieces = torch.ones(4).tensor_split(2)
        gather = me.all_gather(pieces, pieces[me.rank], is_async=True)
        seen = [bool(t.isnan().any()) for t in (tensor, *pieces)]
        spread.wait()
        gather.wait()
        return seen

    assert returned(2, body) == [[False, False, True], [True, True, False]]


def test_works_may_be_waited_for_in_any_order() -> None:
    def body(me: Rank) -> list[float]:
        tensors = [torch.tensor(float(i + me.rank)) for i in range(4)]
        works = [me.all_reduce(t, is_async=True) for t in tensors]
        for i in (3, 0, 2, 1) if me.rank == 0 else (1, 2, 0, 3):
            works[i].wait()
        return [t.item() for t in tensors]

    assert returned(2, body) == [[1.0, 3.0, 5.0, 7.0]] * 2


def test_inputs_are_read_at_the_call_and_not_later() -> None:
    def body(me: Rank) -> list[float]:
        mine = torch.tensor([float(me.rank)])
        pieces = (torch.empty(1), torch.empty(1))
        work = me.all_gather(pieces, mine, is_async=True)
        mine.fill_(99)
        work.wait()
        return [t.item() for t in pieces]

    assert returned(2, body) == [[0.0, 1.0]] * 2


def test_a_result_whose_memory_is_gone_is_not_written() -> None:
    kinds: list[ViolationKind] = []

    def body(me: Rank) -> list[float]:
        pieces = (torch.empty(1000), torch.empty(1000))
        work = me.all_gather(
            pieces, torch.ones(1000), is_async=True, on_violation=lambda kind, _: kinds.append(kind)
        )
        pieces[0].untyped_storage().resize_(0)
        work.wait()
        return [float(pieces[1].untyped_storage().nbytes())]

    assert returned(2, body) == [[4000.0]] * 2
    assert kinds == [ViolationKind.OUTPUT_FREED] * 2


def test_polling_and_futures_end_with_the_result() -> None:
    def body(me: Rank) -> list[float]:
        polled, taken = torch.ones(1), torch.ones(1)
        work = me.all_reduce(polled, is_async=True)
        future = me.all_reduce(taken, is_async=True).get_future()
        while not work.is_completed():
            pass
        (value,) = future.wait()
        return [polled.item(), value.item(), taken.item()]

    assert returned(2, body) == [[2.0, 2.0, 2.0]] * 2


def test_leaves_autograd_and_modes_alone() -> None:
    class Seen(TorchDispatchMode):
        calls: int = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def body(me: Rank) -> tuple[int, int, list[float]]:
        leaf = torch.ones(2, requires_grad=True)
        with torch.inference_mode():
            inference = torch.ones(2)
        with Seen() as seen:
            work = me.all_reduce(leaf, is_async=True)
            work.wait()
            me.all_reduce(inference)
            calls = seen.calls
        return leaf._version, calls, [*leaf.tolist(), *inference.tolist()]

    assert returned(2, body) == [(0, 0, [2.0] * 4)] * 2


def test_keeps_no_tensor_once_every_rank_took_its_part() -> None:
    odd = 12_347

    def body(me: Rank) -> list[dist.Work]:
        tensor = torch.ones(odd)
        first = me.all_reduce(tensor, is_async=True)
        first.wait()
        pieces = tuple(torch.empty(odd) for _ in range(me.size))
        return [first, me.all_gather(pieces, tensor), me.all_reduce(tensor)]

    transport = InMemoryTransport(2)
    works = outcomes(2, body, transport)
    gc.collect()
    # type(), because asking some of torch's modules for their class warns.
    assert not [o for o in gc.get_objects() if issubclass(type(o), Tensor) and o.numel() == odd]
    assert len(works) == 2


# ---- messages


def test_messages_arrive_in_order_by_source_and_tag() -> None:
    def body(me: Rank) -> list[float]:
        if me.rank == 0:
            for value, tag in ((1.0, 0), (2.0, 5), (3.0, 0)):
                me.send(torch.tensor([value]), 1, tag)
            return []
        got = [torch.empty(1) for _ in range(3)]
        works = [me.recv(t, 0, tag) for t, tag in zip(got, (5, 0, 0), strict=True)]
        for work in reversed(works):  # the order of posting decides the receiver of each message
            work.wait()
        return [t.item() for t in got]

    assert returned(2, body)[1] == [2.0, 1.0, 3.0]


def test_receives_from_any_source_and_names_it() -> None:
    def body(me: Rank) -> list[tuple[float, int]]:
        if me.rank:
            me.send(torch.tensor([10.0 * me.rank]), 0)
            return []
        got = []
        for _ in range(2):
            tensor = torch.empty(1)
            work = me.recv(tensor, None)
            work.wait()
            got.append((tensor.item(), work.source_rank()))
        return sorted(got)

    assert returned(3, body)[0] == [(10.0, 1), (20.0, 2)]


def test_a_receive_is_garbage_until_waited_for() -> None:
    def body(me: Rank) -> bool | None:
        if me.rank == 0:
            me.send(torch.ones(2), 1)
            me.barrier()
            return None
        tensor = torch.zeros(2)
        work = me.recv(tensor, 0)
        me.barrier()
        early = bool(tensor.isnan().all())
        work.wait()
        return early and bool((tensor == 1).all())

    assert returned(2, body)[1] is True


def test_a_message_that_does_not_fit_is_diagnosed() -> None:
    def body(me: Rank) -> None:
        if me.rank == 0:
            me.send(torch.ones(3), 1).wait()
        else:
            me.recv(torch.ones(2, dtype=torch.float64), 0).wait()

    for error in outcomes(2, body):
        assert isinstance(error, CollectiveMismatchError)
        assert "recv(float64[2], from rank 0" in str(error)
        assert "send(float32[3], to rank 1" in str(error)


# ---- disagreement


def _different_op(me: Rank) -> None:
    if me.rank == 1:
        me.broadcast(torch.ones(2), root=0)
    else:
        me.all_reduce(torch.ones(2))


def _different_dtype(me: Rank) -> None:
    me.all_reduce(torch.ones(2, dtype=torch.float64 if me.rank == 1 else torch.float32))


def _different_size(me: Rank) -> None:
    me.all_reduce(torch.ones(2 + (me.rank == 1)))


def _different_reduction(me: Rank) -> None:
    me.all_reduce(torch.ones(2), RedOp.MAX if me.rank == 1 else RedOp.SUM)


def _different_root(me: Rank) -> None:
    me.broadcast(torch.ones(2), root=int(me.rank == 1))


def _different_count(me: Rank) -> None:
    parts = tuple((torch.ones(1),) for _ in range(1 + (me.rank == 1)))
    me.call(Op.ALL_REDUCE, parts, parts, reduce_op=RedOp.SUM)


@pytest.mark.parametrize(
    ("body", "this", "that"),
    [
        (_different_op, "all_reduce(sum, float32[2])", "broadcast(float32[2], root rank 0)"),
        (_different_dtype, "all_reduce(sum, float32[2])", "all_reduce(sum, float64[2])"),
        (_different_size, "all_reduce(sum, float32[2])", "all_reduce(sum, float32[3])"),
        (_different_reduction, "all_reduce(sum, float32[2])", "all_reduce(max, float32[2])"),
        (_different_root, "broadcast(float32[2], root rank 0)", "broadcast(float32[2], root rank 1)"),
        (_different_count, "all_reduce(sum, float32[1])", "all_reduce(sum, float32[1], float32[1])"),
    ],
    ids=lambda v: v.__name__.removeprefix("_") if callable(v) else "",
)
def test_disagreement_is_diagnosed_on_every_rank(body: Body, this: str, that: str) -> None:
    def barrier_first(me: Rank) -> None:
        me.barrier()
        body(me)

    for error in outcomes(3, barrier_first):
        assert isinstance(error, CollectiveMismatchError)
        text = str(error)
        assert "collective #1 of group everybody [0, 1, 2]" in text
        assert f"on rank(s) [1] {that} at tests/worlds/test_transport.py:" in text
        assert f"{this} at tests/worlds/test_transport.py:" in text


def test_disagreement_wakes_waiting_ranks_without_waiting_for_the_rest() -> None:
    apart = threading.Event()

    def body(me: Rank) -> None:
        if me.rank == 2:
            apart.wait(_HANG_S)  # computes until the other ranks detect it
            return
        try:
            me.all_reduce(torch.ones(1 + me.rank))
        finally:
            apart.set()

    first, second, third = outcomes(3, body)
    assert isinstance(first, CollectiveMismatchError)
    assert isinstance(second, CollectiveMismatchError)
    assert third is None


def test_pieces_that_do_not_fit_are_diagnosed_on_every_rank() -> None:
    def lopsided(me: Rank) -> None:
        sent = tuple(torch.ones(2) for _ in range(2))
        received = tuple(torch.ones(2 + (me.rank == 1 and s == 0)) for s in range(2))
        me.call(Op.ALL_TO_ALL, (sent,), (received,))

    def short(me: Rank) -> None:
        me.all_gather((torch.ones(2), torch.ones(2)), torch.ones(2 + me.rank))

    for body in (lopsided, short):
        for error in outcomes(2, body):
            assert isinstance(error, CollectiveMismatchError)
            assert "elements from rank" in str(error)


def test_a_contradictory_call_is_refused() -> None:
    def body(me: Rank) -> None:
        me.all_gather((torch.ones(2), torch.ones(2)), torch.ones(2, dtype=torch.float64))

    for error in outcomes(2, body):
        assert isinstance(error, CollectiveMismatchError)
        assert "one dtype for input and output" in str(error)


# ---- ends


def test_crossed_groups_are_diagnosed_at_once() -> None:
    def body(me: Rank) -> None:
        for name in ("a", "b") if me.rank == 0 else ("b", "a"):
            me.all_reduce(torch.ones(1), group_name=name)

    for error in outcomes(2, body):
        assert isinstance(error, DeadlockError)
        text = str(error)
        assert "rank 0 waits for rank(s) [1] in collective #0 of group a [0, 1]: all_reduce(" in text
        assert "rank 1 waits for rank(s) [0] in collective #0 of group b [0, 1]: all_reduce(" in text


def test_crossed_groups_are_fine_when_issued_before_waiting() -> None:
    def body(me: Rank) -> list[float]:
        tensors = {name: torch.ones(1) for name in ("a", "b")}
        order = ("a", "b") if me.rank == 0 else ("b", "a")
        works = [me.all_reduce(tensors[n], group_name=n, is_async=True) for n in order]
        for work in works:
            work.wait()
        return [t.item() for t in tensors.values()]

    assert returned(2, body) == [[2.0, 2.0]] * 2


def test_waiting_for_a_rank_that_returned_is_diagnosed_at_once() -> None:
    busy = threading.Event()

    def body(me: Rank) -> None:
        if me.rank == 1:
            return
        if me.rank == 2:
            busy.wait(_HANG_S)  # still computing: not all ranks are stuck
            return
        try:
            me.barrier()
        finally:
            busy.set()

    stuck, left, computing = outcomes(3, body)
    assert isinstance(stuck, DeadlockError)
    assert "rank 1 has returned" in str(stuck)
    assert left is None
    assert computing is None


def test_two_receives_from_each_other_are_diagnosed() -> None:
    for error in outcomes(2, lambda me: me.recv(torch.ones(1), 1 - me.rank).wait()):
        assert isinstance(error, DeadlockError)
        assert "a message from rank" in str(error)


def test_two_sends_to_each_other_are_diagnosed() -> None:
    # gloo and nccl hang here: neither send ends before it is received.
    def body(me: Rank) -> None:
        me.send(torch.ones(1), 1 - me.rank).wait()
        me.recv(torch.ones(1), 1 - me.rank).wait()

    for error in outcomes(2, body):
        assert isinstance(error, DeadlockError)
        assert "a message to rank" in str(error)


def test_a_late_rank_is_no_deadlock() -> None:
    others_wait = threading.Event()

    def body(me: Rank) -> float:
        tensor = torch.ones(1)
        if me.rank == 2:
            others_wait.wait(0.2)  # long enough for both others to block; no assertion depends on it
        me.all_reduce(tensor)
        return tensor.item()

    assert returned(3, body) == [3.0] * 3


def test_a_thread_of_a_blocked_rank_may_still_issue_the_missing_call() -> None:
    def body(me: Rank) -> float:
        tensor, other = torch.ones(1), torch.ones(1)
        if me.rank == 0:
            started, both_blocked = threading.Event(), threading.Event()

            def help_out() -> None:
                me.barrier(group_name="first", ranks=(0,))  # makes this thread one that communicates
                started.set()
                both_blocked.wait(0.2)
                me.all_reduce(other, group_name="b")

            helper = threading.Thread(target=help_out, daemon=True)
            helper.start()
            started.wait(_HANG_S)
            me.all_reduce(tensor, group_name="a")
            helper.join()
        else:
            me.all_reduce(other, group_name="b")
            me.all_reduce(tensor, group_name="a")
        return (tensor + other).item()

    assert returned(2, body) == [4.0, 4.0]


def test_abort_wakes_the_blocked_past_any_except_exception() -> None:
    transport = InMemoryTransport(3)

    def body(me: Rank) -> None:
        if me.rank == 2:
            transport.abort(ValueError("the weights are wrong"))
            raise ValueError("the weights are wrong")
        try:
            me.barrier()
        except Exception:
            return

    first, second, third = outcomes(3, body, transport)
    assert isinstance(first, WorldAbandonedError)
    assert isinstance(second, WorldAbandonedError)
    assert "the weights are wrong" in str(first)
    assert not isinstance(first, Exception)
    assert isinstance(third, ValueError)


def test_nothing_starts_after_an_abort() -> None:
    transport = InMemoryTransport(1)
    transport.abort("over")
    (error,) = outcomes(1, lambda me: me.barrier(), transport)
    assert isinstance(error, WorldAbandonedError)


def test_a_timeout_names_the_missing_ranks() -> None:
    over = threading.Event()

    def body(me: Rank) -> None:
        if me.rank == 1:
            over.wait(_HANG_S)
            return
        try:
            me.barrier(timeout_s=0.05)
        finally:
            over.set()

    late, _ = outcomes(2, body)
    assert isinstance(late, CollectiveTimeoutError)
    assert "no call from rank(s) [1]; rank 0 called barrier() at" in str(late)
