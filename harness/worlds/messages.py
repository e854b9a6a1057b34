"""The messages between a host process and its supervisor.

A supervisor sends jobs by pickle. What comes back passed through a process that runs an engine's code, so it is data:
one line of JSON a message, in which plain values and the dataclasses below have a form, and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardproof.harness.tracing import codec
from shardproof.harness.worlds.outcome import Outcome
from shardproof.harness.worlds.output import SUFFIX
from shardproof.harness.worlds.printable import shortened
from shardproof.harness.worlds.spec import WorldSpec

_LONGEST = 16 * 2**20  # bytes of one message; the values that ranks return are words and numbers
_LONGEST_TEXT = 200_000  # characters of a message, traceback or stack
_ENCODER = json.JSONEncoder()  # made before an engine is imported, which may replace json.dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One process of a world: the world, the ranks that live in it, and a folder for its store and stacks.

    ``environment`` is what launchers give a rank. Ranks meet at ``store``, a port of its MASTER_ADDR; None for a file.
    ``temporary`` are the variables that name the temporary folder of the world.
    """

    world: WorldSpec
    ranks: tuple[int, ...]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    temporary: Mapping[str, str] = field(default_factory=dict)
    store: int | None = None

    @property
    def stack_file(self) -> Path:
        """Where the process writes the stacks of all its threads, when it crashes or is asked to."""
        return self.folder / f"host{self.ranks[0]}.stacks"

    @property
    def output_file(self) -> Path:
        """Where everything goes that the process prints."""
        return self.folder / f"host{self.ranks[0]}{SUFFIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a world is to run: ``body(context, *args)``; journals and files go to ``folder``.

    ``seed`` is the schedule's; see `Scheduler`.
    """

    body: Callable[..., Any]  # Any: the signature is (RankContext, *args)
    args: tuple[Any, ...]
    folder: Path
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Host: imports are done; the clock may start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Host: this rank runs on this thread (``threading.get_ident``), which names it in a stack file."""

    rank: int
    thread_ident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Host: this rank ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Dying:
    """Host: this rank is about to end the whole process, by a call that leaves no time to say so later."""

    rank: int
    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastThread:
    """A thread that is no daemon and ran when its rank had returned; ``rank`` is None if unknown."""

    name: str
    ident: int
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Host: no job is left; my main thread, of this ident, waits for these threads, and then runs the exit hooks."""

    ident: int
    threads: tuple[LastThread, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Host: all is done; I end with status 0 as soon as I am let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbled:
    """Bytes that are no message, in words; never sent. What comes after them is not read."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Agent: who I am, on which machine, with which releases; ``clock_s`` is CLOCK_MONOTONIC, ``folder`` my own."""

    token: str
    rank: int
    host: str
    local_rank: int
    node: str
    releases: str
    folder: str
    clock_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Agent: the host of my rank, after so many commands; ``error`` is why the last one could not be obeyed."""

    answered: int
    is_ready: bool = False
    has_left: bool = False
    is_over: bool = False
    outcome: Outcome | None = None
    stack: str = ""
    error: str = ""
    leaks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """Agent: the next bytes, in base64, of a file of my rank; ``start`` is where they belong."""

    name: str
    start: int
    data: str


Message = Ready | Started | Finished | Dying | Leaving | Done | Hello | HostState | FilePiece


def send(connection: Connection, message: Message) -> None:
    """Send a whole message; raises TypeError if a rank returned what is no plain value."""
    left = memoryview(encode(message))
    while left:
        left = left[os.write(connection.fileno(), left) :]


def encode(message: Message) -> bytes:
    """Return the line of a message; long texts lose their middle."""
    line = _ENCODER.encode(_shortened(codec.encode_one_of(message))).encode()
    if len(line) > _LONGEST:
        raise TypeError(f"the message has {len(line)} bytes, and {_LONGEST} are the most")
    return line + b"\n"


class Inbox:
    """Reads messages as they come, and never waits for the rest of one."""

    def __init__(self, connection: Connection, longest: int = _LONGEST) -> None:
        self._connection = connection
        self._longest = longest
        self._pending = bytearray()
        self._is_garbled = False

    def read(self) -> list[Message | Garbled]:
        """Read what is there, once, waiting if there is nothing; raises EOFError at the end."""
        piece = os.read(self._connection.fileno(), 2**16)
        if not piece:
            raise EOFError
        self._pending += piece
        return list(self._messages())

    def _messages(self) -> Iterator[Message | Garbled]:
        *lines, rest = self._pending.split(b"\n") if b"\n" in self._pending else [self._pending]
        self._pending = bytearray(rest)
        found = [_decoded(bytes(line)) for line in lines]
        if len(rest) > self._longest:
            found.append(Garbled(text=f"{len(rest)} bytes without the end of a message"))
        for message in found:
            if not self._is_garbled:
                yield message
            self._is_garbled |= isinstance(message, Garbled)
        if self._is_garbled:
            self._pending.clear()


# Any: JSON.
def _shortened(plain: Any) -> Any:
    """Cut long texts in the middle."""
    if isinstance(plain, dict):
        return {key: _shortened(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_shortened(value) for value in plain]
    return shortened(plain, _LONGEST_TEXT) if isinstance(plain, str) else plain


def _decoded(line: bytes) -> Message | Garbled:
    try:
        message: Message = codec.decode(Message, json.loads(line), is_older=False)
    except codec.UNREADABLE as error:
        return Garbled(text=f"{line[:80]!r} ({type(error).__name__})")
    return message
