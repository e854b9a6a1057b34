"""Runs one rank's training under all watches that it requests, which share one dispatch mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from shardproof.harness.cases.training import Watch
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.memory.census import Census
from shardproof.harness.tracing.memory.tracker import MemoryTracker
from shardproof.harness.tracing.operators import OperatorMode, observing_operators
from shardproof.harness.tracing.races.cuda_streams import watched_cuda_streams
from shardproof.harness.tracing.races.detector import RaceDetector, set_watch
from shardproof.harness.tracing.races.streams import tracked_streams
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.tracing.unit_hooks import ComputeDtypes
from shardproof.harness.training.layout_memory import Form
from shardproof.harness.training.rank_probes import RankProbes
from shardproof.harness.worlds.rank import RankContext


@dataclass(slots=True, kw_only=True, eq=False)
class Watches:
    """The requested watches; ``form`` is that of the model before the engine prepared it, for the census."""

    races: RaceDetector | None = None
    lifetimes: MemoryTracker | None = None
    census: Census | None = None
    form: Form | None = None
    mode: OperatorMode | None = None
    probes: RankProbes | None = None
    dtypes: ComputeDtypes = field(default_factory=ComputeDtypes)

    def reading(self) -> AbstractContextManager[None]:
        """Return a context for reads of the engine, whose operators the census does not see."""
        return nullcontext() if self.mode is None else self.mode.paused()


@contextmanager
def observing(context: RankContext, watches: Watches | None, step: int = -1) -> Iterator[None]:
    """Observe an engine in this context: label the calls, and exclude reads from the census."""
    with (
        context.recorder.during(Phase.OBSERVE, step=step),
        nullcontext() if watches is None else watches.reading(),
    ):
        yield


@contextmanager
def watching(
    watches: frozenset[Watch], recorder: Recorder, device_type: str = "cpu", *, census: Census | None = None
) -> Iterator[Watches]:
    """Watch the memory operations of the calling thread's rank, and their streams on a device, until exit."""
    streams = watched_streams(recorder, device_type) if Watch.RACES in watches else nullcontext()
    lifetimes = MemoryTracker(recorder) if Watch.LIFETIMES in watches else None
    with streams as races:
        witnesses = [watch for watch in (races, lifetimes) if watch is not None]
        with observing_operators(*witnesses, made=None if census is None else census.made) as mode:
            yield Watches(races=races, lifetimes=lifetimes, census=census, mode=mode)


@contextmanager
def watched_streams(recorder: Recorder, device_type: str = "cpu") -> Iterator[RaceDetector]:
    """Watch the streams of the calling thread's rank until exit; `observing_operators` reports the operators.

    On CUDA these are real streams, which torch reports. Elsewhere fake streams that record replace those of the
    device's module.
    """
    of_device: AbstractContextManager[RaceDetector] = (
        watched_cuda_streams(recorder) if device_type == "cuda" else _remembering(recorder, device_type)
    )
    with of_device as watch:
        set_watch(watch)
        try:
            yield watch
        finally:
            set_watch(None)


@contextmanager
def _remembering(recorder: Recorder, device_type: str) -> Iterator[RaceDetector]:
    with tracked_streams(device_type):
        watch = RaceDetector(recorder)
        watch.device_type = device_type
        yield watch
