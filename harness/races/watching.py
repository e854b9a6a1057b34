"""Putting one rank's streams under the watch, from the preparation of the model to its last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.ledger.recorder import Recorder
from harness.races.streams import tracked_streams
from harness.races.watch import RaceWatch, set_watch

__all__ = ["watched_streams"]


@contextmanager
def watched_streams(recorder: Recorder) -> Iterator[RaceWatch]:
    """Have the calling thread's rank on streams that remember, until exit; operators are told by `witnessed`."""
    watch = RaceWatch(recorder)
    with tracked_streams():
        set_watch(watch)
        try:
            yield watch
        finally:
            set_watch(None)
