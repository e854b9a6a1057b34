"""The watch over one rank's streams: finds races from streams, events, operators, collectives and releases.

[Note: copies that the host does not wait for] A non-blocking copy between a device and pinned memory of the host is
work of a stream. Until the host has waited for it, by an event, a stream or the device, the host may neither read what
the copy writes nor write what it reads (CUDA C++ programming guide, asynchronous concurrent execution). Memory that is
not pinned is staged, so that a copy has done with it once it returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.collectives.call_site import call_site
from shardproof.harness.tracing.current_rank import current_rank
from shardproof.harness.tracing.events import EventKind
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.operators import RanOperator
from shardproof.harness.tracing.races.clock import Clock, Epoch, HappensBefore
from shardproof.harness.tracing.races.race_report import Race, RaceKind, RaceReport, Touch
from shardproof.harness.tracing.races.shadow import Access, Memory, is_memory, span_of, unordered
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.tracing.storages import Storages

DEFAULT = 0
"""The timeline of the default stream."""

_HOST = "cpu"


class _Selected(threading.local):
    timeline: int = DEFAULT


class RaceDetector:
    """One rank's watch. Thread-safe: an engine may issue from threads of its own.

    It ignores the harness's own operators that observe: they are no part of the engine, and would add order.
    """

    device_type = "cpu"
    """The device whose streams and memory are watched."""

    def __init__(self, recorder: Recorder) -> None:
        self.streams: dict[int, object] = {}  # by timeline, to look up the current one
        self._recorder = recorder
        self._order = HappensBefore()
        self._memory = Memory()
        self._storages = Storages()
        self._names = {self._order.begin(): "the default stream"}
        self._selected = _Selected()
        self._races: dict[tuple[object, ...], Race] = {}
        self._under_way: dict[int, list[Access]] = {}  # non-blocking copies, by the host's memory
        self._in_flight: dict[int, Epoch] = {}  # those the default stream has not waited for, by number
        self._num_touches = 0
        self._num_collectives = 0
        self._lock = threading.RLock()

    @property
    def selected(self) -> int:
        """Return the timeline of the calling thread's current stream."""
        return self._selected.timeline

    @selected.setter
    def selected(self, timeline: int) -> None:
        self._selected.timeline = timeline

    # Streams and events -----------------------------------------------------------------------------------

    def begin_stream(self, name: str) -> int:
        """Record a new stream; return its timeline."""
        with self._lock:
            timeline = self._order.begin()
            self._names[timeline] = f"stream {timeline}" + (f" ({name})" if name else "")
            return timeline

    def signal(self, timeline: int) -> Clock:
        """Record an event on a stream."""
        with self._lock:
            self._settle()
            return self._order.signal(timeline)

    def wait(self, timeline: int, fired: Clock) -> None:
        """Record that a stream waits for an event."""
        with self._lock:
            self._settle()
            self._order.wait(timeline, fired)
            self._land()

    def host_waits(self, fired: Clock) -> None:
        with self._lock:
            self._settle()
            self._order.host_waits(fired)
            self._land()

    def host_waits_for_stream(self, timeline: int) -> None:
        if not self._is_observing:
            self.host_waits(self.signal(timeline))

    def host_read(self) -> None:
        self.host_waits_for_stream(self.selected)

    def host_waits_for_all(self) -> None:
        for timeline in list(self._names):
            self.host_waits_for_stream(timeline)

    # Operators and memory ---------------------------------------------------------------------------------

    def operator(self, ran: RanOperator) -> None:
        if self._is_observing:
            return
        with self._lock:
            self._settle()
            self._touch_all(ran.name, ran.reads, ran.writes, self.selected, ran.fresh)
            if self.device_type != _HOST:
                self._touch_host(ran)

    def allocated(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._settle()
            self._memory.allocate(self._storages.key(tensor.untyped_storage()), self.selected)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Record that a storage released its memory, and allocated new memory if it is not empty."""
        if storage.device.type != self.device_type:
            return
        with self._lock:
            self._settle()
            key = self._storages.key(storage)
            self._memory.release(key, self._order.clock)
            if num_bytes:
                self._memory.allocate(key, self.selected)

    def recorded(self, tensor: torch.Tensor, timeline: int) -> None:
        """Record that a stream uses a tensor, as `record_stream` reports to the allocator."""
        with self._lock:
            self._settle()
            self._memory.record(self._storages.key(tensor.untyped_storage()), timeline)

    # Collectives ------------------------------------------------------------------------------------------

    def issued(self, call: Call, seq: int = -1) -> Clock | None:
        """Record a collective: on the current stream if that waits for it, else on a timeline of its own.

        Returns what a wait for its work will order.
        """
        if self._is_observing:
            return None
        with self._lock:
            self._settle()
            self._num_collectives += 1
            timeline = self.selected
            if call.is_async:
                timeline = self._order.begin(self._before(call))
                self._names[timeline] = f"the {call.op}'s own stream"
            reads = [t for part in call.inputs for t in part]
            writes = [t for part in call.outputs for t in part]
            self._touch_all(str(call.op), reads, writes, timeline, set(), is_passing=call.is_async)
            if seq >= 0:
                self._recorder.mark(EventKind.PLACED, seq=seq, stream=self._names[self.selected])
                self._in_flight[seq] = self._order.moment(timeline)
                self._land()
            return self._order.clock(timeline) if call.is_async else None

    def waited(self, done: Clock | None) -> None:
        if done is not None:
            self.wait(self.selected, done)

    def handed_over(self) -> None:
        """Do nothing: on a CPU no stream carries a collective."""

    def report(self) -> RaceReport:
        """Return the races found so far."""
        with self._lock:
            return RaceReport(
                num_touches=self._num_touches,
                num_streams=sum(not name.endswith("own stream") for name in self._names.values()),
                num_collectives=self._num_collectives,
                races=tuple(self._races.values()),
            )

    # Memory of the host -----------------------------------------------------------------------------------

    def _touch_host(self, ran: RanOperator) -> None:
        """Record what an operator does to memory of the host; see [Note: copies that the host does not wait for]."""
        of_host = [
            (tensor, is_write)
            for is_write, tensors in ((False, ran.reads), (True, ran.writes))
            for tensor in tensors
            if is_memory(tensor, _HOST)
        ]
        if not of_host:
            return
        is_copy = any(is_memory(tensor, self.device_type) for tensor in (*ran.reads, *ran.writes))
        for tensor, is_write in of_host:
            key = self._storages.key(tensor.untyped_storage())
            if is_copy and ran.is_deferred and tensor.is_pinned():
                self._under_way.setdefault(key, []).append(self._host_access(ran, tensor, is_write=is_write))
                continue
            if key in self._under_way:
                self._check_host(key, self._host_access(ran, tensor, is_write=is_write))
            if is_copy and is_write:
                self.host_read()

    def _host_access(self, ran: RanOperator, tensor: torch.Tensor, *, is_write: bool) -> Access:
        touch = replace(self._touch(ran.name, self.selected), is_write=is_write)
        return Access(touch, self._order.moment(self.selected), span_of(tensor))

    def _check_host(self, key: int, access: Access) -> None:
        """Report copies to or from a piece of the host's memory that the host has not waited for."""
        host, touch = self._order.host, replace(access.touch, stream="the host")
        for conflict in unordered(self._under_way[key], access, host):
            self._note(conflict.kind, conflict.earlier, touch)
        self._under_way[key] = [copy for copy in self._under_way[key] if not host.knows(copy.moment)]

    # ------------------------------------------------------------------------------------------------------

    @property
    def _is_observing(self) -> bool:
        return self._recorder.phase is Phase.OBSERVE

    def _before(self, call: Call) -> Clock:
        """Return what happens before the start of an asynchronous collective."""
        return self._order.signal(self.selected)

    def _land(self) -> None:
        """Record in the event log which collectives the default stream, on which units compute, now waits for."""
        clock = self._order.clock(DEFAULT)
        for seq in [s for s, moment in self._in_flight.items() if clock.knows(moment)]:
            del self._in_flight[seq]
            self._recorder.mark(EventKind.JOINED, seq=seq)

    def _settle(self) -> None:
        """Record the releases since the last event, before the next event."""
        for key in self._storages.ended():
            self._memory.release(key, self._order.clock)
            self._under_way.pop(key, None)

    def _touch_all(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        timeline: int,
        fresh: set[int],
        *,
        is_passing: bool = False,
    ) -> None:
        touch = self._touch(name, timeline)
        # An operator that reads and writes has one race with an earlier operator, not two.
        races_with: set[Touch] = set()
        for is_write, tensors in ((False, reads), (True, writes)):
            reported = replace(touch, is_write=is_write) if is_write else touch
            for tensor in (t for t in tensors if is_memory(t, self.device_type)):
                storage = tensor.untyped_storage()
                key = self._storages.key(storage)
                if id(storage) in fresh and not self._memory.is_known(key):
                    self._memory.allocate(key, timeline)
                access = Access(reported, self._order.moment(timeline), span_of(tensor), is_passing)
                self._num_touches += 1
                for conflict in self._memory.touch(key, access, self._order.clock(timeline)):
                    if conflict.earlier not in races_with:
                        races_with.add(conflict.earlier)
                        self._note(conflict.kind, conflict.earlier, reported)

    def _touch(self, operator: str, timeline: int) -> Touch:
        place = self._recorder.place
        return Touch(
            operator=operator,
            is_write=False,
            stream=self._names[timeline],
            phase=place.phase,
            step=place.step,
            microbatch=place.microbatch,
            unit=place.unit,
            site=call_site(),
            at_ns=time.monotonic_ns(),
        )

    def _note(self, kind: RaceKind, first: Touch, second: Touch) -> None:
        key = (kind, first.place, second.place)
        known = self._races.get(key)
        self._races[key] = (
            Race(kind=kind, first=first, second=second)
            if known is None
            else replace(known, count=known.count + 1)
        )


_watches: dict[int | None, RaceDetector] = {}  # by rank; None is the only rank of its process


def current_watch() -> RaceDetector | None:
    """Return the watch over the calling thread's rank, if there is one."""
    return _watches.get(current_rank()) if _watches else None


def set_watch(watch: RaceDetector | None) -> None:
    """Put the calling thread's rank under a watch; None ends it."""
    if watch is None:
        _watches.pop(current_rank(), None)
    else:
        _watches[current_rank()] = watch
