"""Runs a function as several ranks of the calling process, which communicate in memory. There is no engine here.

[Note: all ranks at once] A model whose loss depends on the rows of all ranks has no reference on one process alone. Its
ranks' copies run here at the same time, on a thread each, and exchange what their own code exchanges.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch.distributed as dist

from shardproof.harness.tracing.collectives.interception import Interceptor, standing_in_c10d
from shardproof.harness.tracing.current_rank import bind_rank
from shardproof.harness.worlds.exception_outcome import is_abandonment
from shardproof.harness.worlds.threads.isolation import isolate_threads
from shardproof.harness.worlds.threads.process_group import (
    BACKEND,
    MemoryStore,
    global_ranks,
    register_threads_backend,
)
from shardproof.harness.worlds.threads.scheduler import Scheduler
from shardproof.harness.worlds.threads.transport import InMemoryTransport

_T = TypeVar("_T")
Inside = Callable[[], AbstractContextManager[object]]


def own_rank() -> int:
    """Return the rank of the calling thread; 0 outside `together`."""
    return dist.get_rank() if dist.is_initialized() else 0


def together(size: int, body: Callable[[int], _T], inside: Inside = nullcontext) -> list[_T]:
    """Call ``body(rank)`` on one thread per rank, in a context that ``inside`` makes; returns what each rank returns.

    Raises the error of the first rank that did not just wait for another. Not for a process that hosts a world.
    """
    register_threads_backend()
    store = MemoryStore()
    scheduler = store.scheduler = Scheduler(size)
    transport = InMemoryTransport(size, scheduler)

    def live(rank: int) -> _T:
        bind_rank(rank)
        scheduler.begin(rank)
        try:
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
            with inside():
                result = body(rank)
            transport.leave(rank)
            dist.destroy_process_group()
            return result
        except BaseException as error:  # the edge of a rank: the others may be waiting for it
            transport.abort(error)
            raise
        finally:
            scheduler.end(rank)

    interceptor = Interceptor(recorder=lambda: None, ranks_of=global_ranks, transport=transport)
    with isolate_threads(), standing_in_c10d(interceptor), ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(live, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not is_abandonment(error)), errors[0])
    return [future.result() for future in futures]
