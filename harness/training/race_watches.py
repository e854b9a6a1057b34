"""Putting one rank's streams under the watch, from the preparation of the model to its last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from harness.tracing.races.cuda import watched_cuda_streams
from harness.tracing.races.detector import RaceDetector, set_watch
from harness.tracing.races.streams import tracked_streams
from harness.tracing.recorder import Recorder

__all__ = ["watched_streams"]


@contextmanager
def watched_streams(recorder: Recorder, device_type: str = "cpu") -> Iterator[RaceDetector]:
    """Have the calling thread's rank watched until exit; operators are told by `observing_operators`.

    On a CPU its streams are ones that remember; on CUDA they are its own, and torch tells of them.
    """
    of_device: AbstractContextManager[RaceDetector] = (
        watched_cuda_streams(recorder) if device_type == "cuda" else _remembering(recorder)
    )
    with of_device as watch:
        set_watch(watch)
        try:
            yield watch
        finally:
            set_watch(None)


@contextmanager
def _remembering(recorder: Recorder) -> Iterator[RaceDetector]:
    with tracked_streams():
        yield RaceDetector(recorder)
