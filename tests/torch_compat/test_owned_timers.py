"""Timers of torch that run while FSDP1 saves state are per thread, so that ranks in threads may save at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import _debug_utils
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.harness.torch_compat.process_groups import owned_timers
from shardproof.harness.torch_compat.profiler_labels import idle_labels
from tests.shell import python

TIMED = "saving"


def _time_in_two_threads() -> list[str]:
    """Begin to time the same name in two threads at once; return the outcome of the second."""
    profiler: Any = _debug_utils.SimpleProfiler
    met: list[str] = []

    def time_it() -> None:
        try:
            with profiler.profile(TIMED):
                met.append("nothing")
        except AssertionError as error:
            met.append(str(error))

    with profiler.profile(TIMED):
        thread = threading.Thread(target=time_it)
        thread.start()
        thread.join()
    return met


def test_threads_time_the_same_at_once() -> None:
    with owned_timers():
        assert _time_in_two_threads() == ["nothing"]


def test_a_thread_still_may_not_time_the_same_twice() -> None:
    profiler: Any = _debug_utils.SimpleProfiler
    with (
        owned_timers(),
        profiler.profile(TIMED),
        pytest.raises(AssertionError, match="already being profiled"),
        profiler.profile(TIMED),
    ):
        pass


def test_torch_is_as_it_was_afterwards() -> None:
    with owned_timers():
        pass
    (met,) = _time_in_two_threads()
    assert "already being profiled" in met


# Operators in threads.


PROGRAM = """
import sys, threading, torch
from torch.utils._python_dispatch import TorchDispatchMode
from shardproof.harness.torch_compat.dispatch import make_operators

names = [f"first_call_{i}" for i in range(400)]
library = torch.library.Library("threads_of_a_test", "FRAGMENT")
for name in names:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x + 1, "CPU")
make_operators()

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def call_all():
    with Mode():
        for name in names:
            barrier.wait()
            for _ in range(3):
                getattr(torch.ops.threads_of_a_test, name)(torch.ones(3))

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(4)
threads = [threading.Thread(target=call_all) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_operators_are_made_before_threads_ask_for_them() -> None:
    finished = python("-c", PROGRAM)
    assert finished.returncode == 0, finished.stderr


# Labels for the profiler.


class _Counts(TorchDispatchMode):
    """Counts the operators that labels are."""

    num_labels = 0

    # Any: as torch calls a mode.
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_labels += func.namespace == "profiler"
        return func(*args, **(kwargs or {}))


def _label() -> int:
    with _Counts() as counts, record_function("a step") as label:
        assert isinstance(label, record_function)
    return int(counts.num_labels)


def test_a_label_that_no_profiler_reads_calls_no_operator() -> None:
    assert _label() == 2, "else this test shows nothing"
    with idle_labels:
        assert _label() == 0
    assert _label() == 2


def test_a_profiler_finds_the_labels() -> None:
    with idle_labels, profile(activities=[ProfilerActivity.CPU]) as found, record_function("a step"):
        torch.ones(2)
    assert "a step" in {event.name for event in found.events() or ()}


def test_a_profiler_may_begin_or_end_inside_a_label() -> None:
    with idle_labels:
        profiler = profile(activities=[ProfilerActivity.CPU])
        with record_function("before"):
            profiler.start()
        with record_function("after"):
            profiler.stop()
    assert "after" in {event.name for event in profiler.events() or ()}


def test_a_label_that_ends_with_a_future_hands_the_future_on() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    with idle_labels, record_function("a call") as label:
        assert label._call_end_callbacks_on_future(future) is future
