"""The file that a rank writes as it trains: writes and reads the lines of its ledger and its events. No torch here.

[Note: lines by hand] An entry, its wait and its end are written in the path of each collective. A generic encoder there
would take as long as all other recording. So this module formats these lines itself, in a format that the codec reads
like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.harness.regular_file import read_regular
from shardproof.harness.tracing.codec import UNREADABLE, decode, encode, encode_row
from shardproof.harness.tracing.events import EventLog, TraceEvent, events_of
from shardproof.harness.tracing.ledger import BufferViolation, CallSummary, Entry, Ledger, Wait, completed

_MOST_BYTES = 2**30  # a rank can make a sparse file of any size, larger than memory
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # once: json.dumps would build one per line
_FIELDS = tuple(field.name for field in fields(CallSummary))
_OF_TENSORS = ("dtype", "shapes", "num_bytes", "reduce_op", "peer", "is_async")


class Journal(NamedTuple):
    """The journal of one rank.

    ``damaged`` are the numbers of unreadable lines, from 1; the ledger and the events omit them.
    """

    ledger: Ledger
    events: EventLog
    damaged: tuple[int, ...] = ()


def entry_line(entry: Entry, call: CallSummary, at_ns: int) -> str:
    """Return the line of an entry when its call starts; see [Note: lines by hand]."""
    op_and_group, tensors, site_and_name = _json_of_call(call)
    return (
        f'{{"entry":{{"seq":{entry.seq},{op_and_group},"group_seq":{entry.group_seq},"axis":{_json(entry.axis)},{tensors}'
        f',"wait":null,"phase":{_json(entry.phase)},"step":{entry.step},"microbatch":{entry.microbatch}'
        f',"unit":{_json(entry.unit)},"thread":{_json(entry.thread)},{site_and_name},"harms":[]}},"at_ns":{at_ns}}}'
    )


def wait_line(seq: int, wait: Wait, at_ns: int) -> str:
    """Return the line of the first wait for a call."""
    return (
        f'{{"wait":{seq},"phase":{_json(wait.phase)},"step":{wait.step},"microbatch":{wait.microbatch}'
        f',"num_issued":{wait.num_issued},"is_over":{_json(wait.is_over)},"at_ns":{at_ns}}}'
    )


def over_line(seq: int) -> bytes:
    """Return the line, with its newline, of a wait that returned: short, because it is frequent."""
    return b'{"over":%d}\n' % seq


def violation_line(seq: int, violation: BufferViolation) -> str:
    """Return the line of a violation of a call's buffers."""
    return _ENCODER.encode({"harm": seq, **encode(violation)})


def events_line(events: Sequence[tuple[object, ...]]) -> str:
    """Return the line of several events, each the values of a `TraceEvent`, its kind by name."""
    return _ENCODER.encode({"marks": events})


@lru_cache(maxsize=2**12)
def _json(value: str | bool | None) -> str:
    return _ENCODER.encode(value)


@lru_cache(maxsize=2**12)  # each step makes the same calls
def _json_of_call(call: CallSummary) -> tuple[str, str, str]:
    """Return the JSON of a call's own fields, without braces, in the three parts in which an entry contains them."""
    plain = {name: encode(getattr(call, name)) for name in _FIELDS} | {"group": encode_row(call.group)}
    parts = (("op", "group"), _OF_TENSORS, ("site", "group_name"))
    first, second, third = (_ENCODER.encode({name: plain[name] for name in part})[1:-1] for part in parts)
    return first, second, third


def read_journal(path: Path) -> Journal:
    """Read a rank's journal, however the rank ended: drops an unfinished last line; a missing file is empty."""
    try:
        data = read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        return Journal((), ())
    except OSError:  # too large, or no file
        return Journal((), (), damaged=(1,))
    reading = _Reading()
    damaged = []
    for number, line in enumerate(_parsed(data.split(b"\n")[:-1]), start=1):
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
    """Reads one line after the other; a line that raises leaves no trace."""

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
