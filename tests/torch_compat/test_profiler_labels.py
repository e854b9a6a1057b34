"""An engine's labels call no operator without a profiler, and appear in one that runs."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.harness.torch_compat.profiler_labels import idle_labels


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
