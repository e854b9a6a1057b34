"""Timers of torch that run while FSDP1 saves state are per thread, so that ranks in threads may save at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed.fsdp import _debug_utils

from shardproof.harness.torch_compat.process_groups import owned_timers

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
