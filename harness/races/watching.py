"""Putting one rank's training under the watch, from the preparation of the model to its last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.ledger.recorder import Recorder
from harness.races.accesses import AccessMode
from harness.races.streams import tracked_streams
from harness.races.watch import RaceWatch, set_watch

__all__ = ["watching_races"]


@contextmanager
def watching_races(recorder: Recorder) -> Iterator[RaceWatch]:
    """Watch what the calling thread's rank does to memory, and on which streams, until exit."""
    watch = RaceWatch(recorder)
    with tracked_streams():
        set_watch(watch)
        try:
            with AccessMode(watch):
                yield watch
        finally:
            set_watch(None)
