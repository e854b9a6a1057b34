"""Letting threads be ranks: what torch keeps once per process, kept once per rank. Random numbers: rank_rng."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from harness.torch_compat import dispatch, dtensor, process_groups
from harness.torch_compat.patching import Replacement
from harness.tracing.current_rank import adopt_rank, current_rank, own_thread
from harness.worlds.threads.rng import inherit_generator, rank_generator, rank_generators
from harness.worlds.threads.subgroup import split_group, split_method

__all__ = ["isolate_threads"]


class _Own(threading.local):
    """The calling thread's process groups."""

    def __init__(self) -> None:
        self.state = process_groups.c10d_state()
        dispatch.keep_backward_in_thread()


_own = _Own()


class _WorldOfThread:
    """Stands in for torch's table of process groups and hands over to the calling thread's."""

    def __getattr__(self, name: str) -> Any:  # Any: whatever torch's own table has under this name
        return getattr(_own.state, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_own.state, name, value)


@contextmanager
def isolate_threads() -> Iterator[None]:
    """Give every thread process groups, meshes and random numbers of its own, until exit.

    A thread that a rank starts belongs to that rank: it sees the groups that the rank had at the time. Call
    once, before any rank starts, in a process that hosts ranks and nothing else.
    """
    with ExitStack() as stack:
        stack.enter_context(process_groups.replace_world(_WorldOfThread()))
        stack.enter_context(process_groups.thread_isolation())
        stack.enter_context(process_groups.owned_meshes(current_rank))
        stack.enter_context(process_groups.owned_timers())
        stack.enter_context(dtensor.shared_propagation())
        stack.enter_context(process_groups.replace_split_group(split_group, split_method))
        stack.enter_context(rank_generators())
        stack.enter_context(_heirs())
        yield


def _heirs() -> Replacement:
    """Make a thread that a rank starts act for this rank."""
    start = threading.Thread.start  # every way of starting a thread ends there

    def start_as_heir(thread: threading.Thread) -> None:
        rank = current_rank()
        if rank is not None:
            own_thread(thread, rank)
            state, generator, run = _own.state, rank_generator(), thread.run

            def run_as_heir() -> None:
                adopt_rank(rank)
                _own.state = state
                inherit_generator(generator)
                process_groups.register_in_thread(state.pg_names)
                run()

            thread.run = run_as_heir  # type: ignore[method-assign]  # the instance's: subclasses override it
        start(thread)

    return Replacement(lambda: [(threading.Thread, "start", start_as_heir)])
