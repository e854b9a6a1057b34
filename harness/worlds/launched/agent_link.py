"""The connection between the judging process and the agent of one rank, which may be on another machine.

Commands are pickled calls of the agent's methods. The replies are data: the state of the agent's host, and files.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardproof.harness.worlds.messages import FilePiece, Garbled, Hello, HostState, Inbox

# An agent answers in milliseconds, or after some seconds if processes are slow to end.
_REPLY_LIMIT_S = 30.0
_FILE_OF_RANK = re.compile(r"(?:rank|host)(\d+)\.[A-Za-z0-9.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Supervisor: call this method of the agent; ``number`` counts commands."""

    number: int
    method: str
    args: tuple[Any, ...]  # Any: of that method


class AgentLink:
    """The connection to the agent of one rank, as the supervisor sees it."""

    def __init__(self, connection: Connection, hello: Hello, inbox: Inbox, behind_s: float) -> None:
        self.connection = connection
        self.hello = hello
        self.behind_s = behind_s  # the offset of the agent's clock to this process's
        self.state = HostState(answered=0)
        self.why_lost = ""
        self.gathers_to: Path | None = None
        self._inbox = inbox
        self._num_sent = 0

    def send(self, method: str, *args: object) -> int:
        """Send a command; returns its number, which the agent's state reaches once it has obeyed."""
        self._num_sent += 1
        try:
            self.connection.send(Command(number=self._num_sent, method=method, args=args))
        except OSError:
            self._lose("its connection is closed")
        return self._num_sent

    def ask(self, method: str, *args: object, limit_s: float = _REPLY_LIMIT_S) -> None:
        """Send a command and wait until it is obeyed; an agent that sends nothing for this long is lost."""
        if not self.await_answer(self.send(method, *args), limit_s):
            self._lose(f"it did not answer within {limit_s:g} s")

    def await_answer(self, number: int, limit_s: float) -> bool:
        """Wait for the answer to a command as long as messages arrive at least every ``limit_s``."""
        while not self.why_lost and self.state.answered < number:
            if not self.connection.poll(limit_s):
                return False
            self.listen()
        return not self.why_lost

    def listen(self) -> None:
        try:
            while not self.why_lost and self.connection.poll():
                for message in self._inbox.read():
                    self._take(message)
        except (EOFError, ConnectionError):
            self._lose("the process that the launcher started there has ended")
        except OSError as error:
            self._lose(f"its machine cannot be reached: {error.strerror}")

    def _take(self, message: object) -> None:
        match message:
            case HostState():
                self.state = message
            case FilePiece():
                self._keep(message)
            case Garbled(text=text):
                self._lose(f"it sent what is no message: {text}")

    def _keep(self, piece: FilePiece) -> None:
        found = _FILE_OF_RANK.fullmatch(piece.name)
        if self.gathers_to is None or found is None or int(found[1]) != self.hello.rank:
            self._lose(f"it sent a file that was not asked for: {piece.name!r}")
            return
        try:
            data = base64.b64decode(piece.data, validate=True)
        except ValueError:
            self._lose(f"it sent bytes of {piece.name} that cannot be read")
            return
        with (self.gathers_to / piece.name).open("ab" if piece.start else "wb") as file:
            file.write(data)

    def _lose(self, why: str) -> None:
        self.why_lost = self.why_lost or why
