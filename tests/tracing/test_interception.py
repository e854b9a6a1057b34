"""An interceptor leaves calls unchanged: a backend's kernel may drop the GIL, and some calls are not recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.torch_compat.process_groups import HashStore
from shardproof.harness.tracing.collectives.interception import Interceptor, standing_in_c10d
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.tracing.operators import OperatorMode
from shardproof.harness.tracing.recorder import Recorder

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

    def operator(self, name: str, *_: object) -> None:
        self.names.append(name)

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
