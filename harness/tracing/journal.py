"""Reading what a rank wrote down as it happened: its ledger and its events, which lie in one file. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.harness.tracing.codec import UNREADABLE, decode
from shardproof.harness.tracing.events import EventLog, TraceEvent, events_of
from shardproof.harness.tracing.ledger import BufferViolation, Entry, Ledger, Wait, completed

_MOST_BYTES = 2**30  # a rank can make a file of any size, as one hole, that no memory holds


class Journal(NamedTuple):
    """What one rank left; there are no events where the file is older than event logs.

    ``damaged`` are the numbers of lines that cannot be read, from 1; what they held is in neither.
    """

    ledger: Ledger
    events: EventLog
    damaged: tuple[int, ...] = ()


def read_journal(path: Path) -> Journal:
    """Read what a rank left behind, however it ended: an unfinished last line is dropped, a missing file is empty."""
    if not path.is_file():
        return Journal((), ())
    if path.stat().st_size > _MOST_BYTES:
        return Journal((), (), damaged=(1,))
    reading = _Reading()
    damaged = []
    for number, line in enumerate(_parsed(path.read_bytes().split(b"\n")[:-1]), start=1):
        try:
            reading.take(line)
        except UNREADABLE:
            damaged.append(number)
    return Journal(reading.ledger(), tuple(reading.events), tuple(damaged))


# Any, here and below: JSON.
def _parsed(lines: Sequence[bytes]) -> list[Any]:
    try:
        found: list[Any] = json.loads(b"[%b]" % b",".join(lines))  # at once: there are thousands
    except UNREADABLE:
        found = []
    return found if len(found) == len(lines) else [_parsed_line(line) for line in lines]


def _parsed_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UNREADABLE:
        return None


class _Reading:
    """Takes one line after the other; a line that raises leaves nothing behind."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._entries: list[Entry] = []
        self._waits: dict[int, Wait] = {}
        self._harms: dict[int, tuple[BufferViolation, ...]] = {}

    def take(self, line: Any) -> None:
        events = events_of(line)
        if "entry" in line:
            self._entries.append(decode(Entry, line["entry"]))
        elif "harm" in line:
            harm = decode(BufferViolation, _without(line, "harm"))
            self._harms[line["harm"]] = (*self._harms.get(line["harm"], ()), harm)
        elif "over" in line:
            self._waits[line["over"]] = replace(self._waits[line["over"]], is_over=True)
        elif "wait" in line:
            self._waits[line["wait"]] = decode(Wait, _without(line, "wait", "at_ns"))
        self.events += events

    def ledger(self) -> Ledger:
        return completed(self._entries, self._waits, self._harms)


# Any: JSON.
def _without(line: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in names}
