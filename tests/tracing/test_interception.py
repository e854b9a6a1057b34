"""An interceptor leaves calls unchanged: a backend's kernel may drop the GIL, and some calls are not recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof import Returned, launch
from shardproof.harness.torch_compat.process_groups import HashStore
from shardproof.harness.tracing.collectives.interception import Interceptor, standing_in_c10d
from shardproof.harness.tracing.journal import read_journal
from shardproof.harness.tracing.ledger import Ledger, Op, Phase
from shardproof.harness.tracing.operators import OperatorMode, RanOperator
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.worlds.rank import RankContext, journal_path
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind, WorldSpec

# Without the GIL the two ranks meet at once; with it they never do, and gloo times out.
_LIMIT = timedelta(seconds=2)

T = TypeVar("T")


# Any: the stubs lack much of what a group has.
def _pair() -> list[Any]:
    """Make a group of two ranks, both of them of this process."""
    store = HashStore()

    def join(rank: int) -> Any:
        group: Any = dist.ProcessGroup(store, rank, 2)
        gloo = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, 2, _LIMIT)
        group._register_backend(torch.device("cpu"), gloo, backend)
        group._set_default_backend(gloo)
        return group

    return _together(join)


def _together(body: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(body, range(2)))


@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["unheard", "recorded"])
def test_a_kernel_that_waits_leaves_the_gil_to_others(recorder: Recorder | None) -> None:
    pair = _pair()
    with standing_in_c10d(Interceptor(recorder=lambda: recorder, ranks_of=lambda group: (0, 1))):
        _together(lambda rank: pair[rank].monitored_barrier(_LIMIT))
    assert recorder is None or [e.op for e in recorder.ledger()] == [Op.BARRIER] * 2


def test_a_collective_on_meta_tensors_is_not_recorded() -> None:
    pair, recorder = _pair(), Recorder()
    with standing_in_c10d(Interceptor(recorder=lambda: recorder, ranks_of=lambda group: (0, 1))):
        pair[0].allreduce([torch.ones(2, device="meta")])
        assert not recorder.ledger()
        works = _together(lambda rank: pair[rank].allreduce([torch.ones(2)]))
        assert all(work.wait() for work in works)
    assert [e.op for e in recorder.ledger()] == [Op.ALL_REDUCE] * 2


class _Witness:
    """Keeps the names of operators."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def operator(self, ran: RanOperator) -> None:
        self.names.append(ran.name)

    def allocated(self, tensor: torch.Tensor) -> None:
        self.names.append("empty")

    def host_read(self) -> None:
        pass


def test_operators_of_a_backend_in_a_wait_are_none_of_the_engine() -> None:
    pair = _pair()

    def reduce_scatter(rank: int) -> tuple[list[str], list[float]]:
        witness, output = _Witness(), torch.empty(2)
        with OperatorMode([witness]):
            # gloo sums the whole tensor, and copies this rank's part out of it in the wait
            pair[rank]._reduce_scatter_base(output, torch.ones(4)).wait()
            output.neg_()
        return witness.names, output.tolist()

    with standing_in_c10d(Interceptor(recorder=Recorder, ranks_of=lambda group: (0, 1))):
        done = _together(reduce_scatter)
    assert done == [(["ones", "neg_"], [-2.0, -2.0])] * 2


def _waited_for(pair: list[Any], tensor: torch.Tensor) -> Any:
    """Reduce a tensor; return the first rank's work as C++ has it, after Python released it."""
    work = pair[0].allreduce([tensor])
    pair[1].allreduce([torch.ones(2)]).wait()
    work.wait()
    return work.boxed()


def test_a_work_that_is_over_keeps_no_memory() -> None:
    pair, recorder, ended = _pair(), Recorder(), Event()
    with standing_in_c10d(Interceptor(recorder=lambda: recorder, ranks_of=lambda group: (0, 1))):
        tensor = torch.ones(2)
        ref = weakref.ref(tensor.untyped_storage(), lambda _: ended.set())
        boxed = _waited_for(pair, tensor)
        assert tensor.tolist() == [2.0, 2.0]
        del tensor
        assert ended.wait(_LIMIT.total_seconds())  # gloo's own thread may be the last to let go of it
        assert ref() is None
        assert dist.Work.unbox(boxed).wait(_LIMIT)  # as C++ might


# Futures.


KINDS = list(OWN_KINDS)


def _future(value: float) -> Any:
    work = dist.all_reduce(torch.tensor([value]), async_op=True)
    assert work is not None
    return work.get_future()


def _use_futures(context: RankContext) -> dict[str, Any]:
    values: dict[str, Any] = {}
    first = _future(1.0)
    derived = first.then(lambda done: done.value()[0] * 10).then(lambda done: done.value() + 1)
    values["derived"] = float(derived.wait())
    values["again"] = float(derived.value())
    polled = _future(2.0)
    while not polled.done():
        pass
    values["polled"] = float(polled.value()[0])
    several = [_future(3.0), _future(4.0)]
    values["all"] = [float(value[0]) for value in torch.futures.wait_all(several)]
    collected = torch.futures.collect_all([_future(5.0)]).wait()
    values["collected"] = float(collected[0].value()[0])
    delivered: list[float] = []
    called = _future(6.0)
    called.add_done_callback(lambda done: delivered.append(float(done.value()[0])))
    called.wait()
    values["delivered"] = delivered
    reduced = torch.tensor([7.0])
    work = dist.all_reduce(reduced, async_op=True)
    assert work is not None
    work.wait()
    values["there at once"] = []
    work.get_future().add_done_callback(lambda done: values["there at once"].append(float(done.value()[0])))
    return values


def _fail_in_a_callback(context: RankContext) -> str:
    def fail(done: Any) -> None:
        raise ValueError("no")

    failing = _future(1.0).then(fail)
    try:
        failing.wait()
    except ValueError as error:
        return str(error)
    return "nothing raised"


def _train_ddp(context: RankContext) -> bool:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
    for step in range(2):
        with context.recorder.during(Phase.FORWARD, step=step):
            loss = ddp(torch.ones(4, 64)).sum()
        with context.recorder.during(Phase.BACKWARD, step=step):
            loss.backward()
    return all(torch.isfinite(p.grad).all() for p in ddp.parameters() if p.grad is not None)


def _train_a_static_graph(context: RankContext) -> bool:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), static_graph=True)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 4) * (context.rank + 1)).sum().backward()
    return all(torch.isfinite(p.grad).all() for p in ddp.parameters() if p.grad is not None)


def _run(kind: WorldKind, body: Any, folder: Path) -> tuple[list[Any], list[Ledger]]:
    result = launch(WorldSpec(kind=kind, size=2), body, folder=folder)
    values = [o.value if isinstance(o, Returned) else o for o in result.outcomes]
    return values, [read_journal(journal_path(folder, rank)).ledger for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_futures_return_the_results_of_their_works(kind: WorldKind, tmp_path: Path) -> None:
    values, ledgers = _run(kind, _use_futures, tmp_path)
    assert (
        values
        == [
            {
                "derived": 21.0,
                "again": 21.0,
                "polled": 4.0,
                "all": [6.0, 8.0],
                "collected": 10.0,
                "delivered": [12.0],
                "there at once": [14.0],
            }
        ]
        * 2
    )
    assert all(e.wait is not None for ledger in ledgers for e in ledger)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_callback_is_raised_in_the_wait(kind: WorldKind, tmp_path: Path) -> None:
    assert _run(kind, _fail_in_a_callback, tmp_path)[0] == ["no"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_reducer_that_waits_as_it_reduces_is_not_kept_waiting(kind: WorldKind, tmp_path: Path) -> None:
    """In the first step of a static graph DDP reduces in a callback of backward, and waits at once, in C++."""
    values, ledgers = _run(kind, _train_a_static_graph, tmp_path)
    assert values == [True] * 2
    assert all(e.wait is not None for ledger in ledgers for e in ledger)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reducer_of_ddp_waits_when_all_is_computed(kind: WorldKind, tmp_path: Path) -> None:
    """Taking a future is no wait: the buckets are in flight together until the end of backward."""
    values, ledgers = _run(kind, _train_ddp, tmp_path)
    assert values == [True] * 2
    for ledger in ledgers:
        # In the first step DDP has one bucket, and learns the order of gradients.
        reductions = [e for e in ledger if e.op is Op.ALL_REDUCE and e.step == 1 and e.is_async]
        assert len(reductions) > 2
        last = reductions[-1].seq
        assert all(e.wait is not None and e.wait.num_issued == last + 1 for e in reductions)
        assert all(e.wait is not None and e.wait.phase is Phase.BACKWARD for e in reductions)
