"""Writes one rank's ledger as the run goes on: the loop's position, the calls and the waits."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.tracing.events import EventKind
from shardproof.harness.tracing.journal import entry_line, events_line, over_line, violation_line, wait_line
from shardproof.harness.tracing.ledger import (
    BufferViolation,
    CallSummary,
    Entry,
    Ledger,
    Op,
    Phase,
    ViolationKind,
    Wait,
    completed,
)


class LoopPosition(NamedTuple):
    """The position of the training loop: the labels of an entry that is made now."""

    phase: Phase
    step: int
    microbatch: int
    unit: str | None


class Recorder:
    """The ledger of one rank while it is being written.

    Each entry is appended to ``journal`` (JSON lines, one unbuffered write each) when the call is made, so that the
    journal survives the rank's death. Other events are written together with the next entry. Thread-safe: a backend may
    complete work on threads of its own.
    """

    def __init__(self, journal: Path | None = None) -> None:
        self._entries: list[Entry] = []
        self._waits: dict[int, Wait] = {}
        self._harms: dict[int, tuple[BufferViolation, ...]] = {}
        self._over: set[int] = set()
        self._seq_of_group: Counter[tuple[object, ...]] = Counter()
        self._axis_of_group: dict[str, str] = {}
        self._phase = Phase.PREPARE
        self._step = -1
        self._microbatch = -1
        self._units: list[str] = []
        self._is_aside = False
        self._pending: list[tuple[object, ...]] = []
        self._watcher: Callable[[], None] | None = None
        self._is_of_model: Callable[[], bool] | None = None
        self._written = hashlib.sha256()
        self._lost: OSError | None = None
        self._lock = threading.Lock()
        self._home = threading.get_ident()
        # O_APPEND and no buffer: the kernel has the line before the collective starts, even if the process is killed.
        self._journal = None if journal is None else os.open(journal, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def claim_thread(self) -> None:
        """Treat the calling thread as the rank's own, which has the same name in every world."""
        self._home = threading.get_ident()

    def name_axes(self, axis_of_group: Mapping[str, str]) -> None:
        """Set which groups are axes of the mesh, by group name."""
        self._axis_of_group.update(axis_of_group)

    def tell_apart(self, is_of_model: Callable[[], bool]) -> None:
        """Label the calls of forward and backward for which this returns True as the model's own, from now on."""
        self._is_of_model = is_of_model

    @contextmanager
    def during(self, phase: Phase, *, step: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Label entries that are issued inside; restores the outer label at exit."""
        if self._is_aside:
            yield
            return
        outer = (self._phase, self._step, self._microbatch)
        self._phase, self._step, self._microbatch = phase, step, microbatch
        self._units.clear()
        self.mark(EventKind.BEGAN)
        try:
            yield
        finally:
            self.mark(EventKind.ENDED)
            self._phase, self._step, self._microbatch = outer

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave all labels as they are inside, and record no events: what runs there is no part of the training."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def enter_unit(self, unit: str) -> None:
        """Record that a unit's forward began."""
        self._units.append(unit)
        self.mark(EventKind.ENTERED, unit)

    def leave_unit(self, unit: str) -> None:
        """Record that a unit's forward ended; tolerates units that an exception skipped."""
        self.mark(EventKind.LEFT, unit)
        while self._units and self._units.pop() != unit:
            pass

    def enter_unit_backward(self, unit: str) -> None:
        """Record that backward reached a unit, which stays current until backward reaches another."""
        self._units[:] = [unit]
        self.mark(EventKind.BACKWARD_ENTERED, unit)

    def mark(
        self,
        what: EventKind,
        unit: str | None = None,
        *,
        seq: int | None = None,
        stream: str | None = None,
    ) -> None:
        """Record an event that happened now, after a look at the watcher."""
        self.look()
        self.note(what, unit, seq=seq, stream=stream)

    def note(
        self,
        what: EventKind,
        unit: str | None = None,
        *,
        seq: int | None = None,
        stream: str | None = None,
    ) -> None:
        """Record an event without a look: for events that a look itself has found."""
        if self._journal is None or self._is_aside:
            return
        # In its written form, and not a Mark: every unit of every step runs through this.
        at_ns, place = time.monotonic_ns(), (self._phase, self._step, self._microbatch)
        with self._lock:
            self._pending.append((what.name, at_ns, *place, unit, seq, stream))

    def look(self) -> None:
        """Poll the watcher, so that it records its changes before the next event."""
        if self._watcher is not None and self._phase is not Phase.OBSERVE:
            self._watcher()

    @contextmanager
    def watched_by(self, watcher: Callable[[], None]) -> Iterator[None]:
        """Call ``watcher`` before each call and each mark inside; it must not communicate."""
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    @property
    def phase(self) -> Phase:
        """Return the loop's current phase."""
        return self._phase

    @property
    def num_issued(self) -> int:
        """Return the number of calls so far."""
        return len(self._entries)

    @property
    def place(self) -> LoopPosition:
        unit = self._units[-1] if self._units else None
        return LoopPosition(self._phase, self._step, self._microbatch, unit)

    def issued(self, call: CallSummary) -> int:
        """Write an entry and return its sequence number, before the call starts."""
        self.look()
        with self._lock:
            entry = self._entry(call)
            self._entries.append(entry)
            self._write(entry_line(entry, call, time.monotonic_ns()))
        return entry.seq

    def waited(self, seq: int, *, is_over: bool | None = True) -> None:
        """Record a wait for a result; only the first wait counts. See `Wait` for ``is_over``."""
        with self._lock:
            if seq in self._waits:
                return
            wait = Wait(
                phase=self._phase,
                step=self._step,
                microbatch=self._microbatch,
                num_issued=len(self._entries),
                is_over=is_over,
            )
            self._waits[seq] = wait
            self._write(wait_line(seq, wait, time.monotonic_ns()))

    def over(self, seq: int) -> None:
        """Record that the wait returned."""
        with self._lock:
            if seq in self._waits and seq not in self._over:
                self._over.add(seq)
                self._write_text(over_line(seq))

    def record_violation(self, seq: int, kind: ViolationKind, site: str) -> None:
        """Record a use of a call's buffers before its result was there; detected now, at ``site``."""
        with self._lock:
            phase, step, microbatch, unit = self.place
            harm = BufferViolation(
                kind=kind, phase=phase, step=step, microbatch=microbatch, unit=unit, site=site
            )
            self._harms[seq] = (*self._harms.get(seq, ()), harm)
            self._write(violation_line(seq, harm))

    def ledger(self) -> Ledger:
        """Return all entries so far with their waits and buffer violations."""
        with self._lock:
            waits = {
                seq: replace(wait, is_over=True) if seq in self._over else wait
                for seq, wait in self._waits.items()
            }
            return completed(self._entries, waits, self._harms)

    def close(self) -> None:
        """Close the journal; raises OSError if its last lines cannot be written."""
        with self._lock:
            if self._journal is None:
                return
            try:
                self._write()
                if self._lost is not None:
                    raise self._lost
            finally:
                os.close(self._journal)
                self._journal = None

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all that was written to the journal."""
        return self._written.hexdigest()

    def _entry(self, call: CallSummary) -> Entry:
        is_message = call.op in {Op.SEND, Op.RECV}
        stream = (call.group_name, call.op, call.peer) if is_message else (call.group_name,)
        group_seq = self._seq_of_group[stream]
        self._seq_of_group[stream] += 1
        is_home = threading.get_ident() == self._home
        return Entry(
            seq=len(self._entries),
            op=call.op,
            group=call.group,
            group_seq=group_seq,
            axis=self._axis_of_group.get(call.group_name),
            dtype=call.dtype,
            shapes=call.shapes,
            num_bytes=call.num_bytes,
            reduce_op=call.reduce_op,
            peer=call.peer,
            is_async=call.is_async,
            wait=None,
            phase=Phase.MODEL if self._is_models() else self._phase,
            step=self._step,
            microbatch=self._microbatch,
            unit=self._units[-1] if self._units else None,
            thread="main" if is_home else threading.current_thread().name,
            site=call.site,
            group_name=call.group_name,
        )

    def _is_models(self) -> bool:
        is_within = self._phase in {Phase.FORWARD, Phase.BACKWARD}
        return is_within and self._is_of_model is not None and self._is_of_model()

    def _write(self, line: str = "") -> None:
        """Write a line, after the events before it: one write for both."""
        lines = [events_line(self._pending)] if self._pending else []
        self._write_text("".join(f"{text}\n" for text in (*lines, line) if text).encode())
        self._pending.clear()

    def _write_text(self, text: bytes) -> None:
        if self._journal is None or self._lost is not None:  # no line may follow a partial one
            return
        try:
            written = os.write(self._journal, text)
            if written != len(text):  # a full disk shows this way before it raises
                raise OSError(
                    f"the ledger: only {written} of {len(text)} bytes were taken; is the disk full?"
                )
        except OSError as error:
            self._lost = error
            raise
        self._written.update(text)
