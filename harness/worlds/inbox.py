"""Reading a host's messages without ever waiting for one: half a message must not hold up the supervisor."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

__all__ = ["Inbox"]

_CHUNK_BYTES = 1 << 16
_SHORT = struct.Struct("!i")  # how a Connection announces a message's length; -1 where the long form follows
_LONG = struct.Struct("!Q")


class Inbox:
    """The messages that came through a connection.

    `Connection.recv` waits for the rest of a message. A rank that is stopped while it sends, or that dies so while a
    child holds the connection open, never sends the rest.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bytes = bytearray()

    def messages(self) -> Iterator[object]:
        """Yield every message that is here in whole; raises EOFError or OSError once the other side is closed."""
        while self._connection.poll():
            chunk = os.read(self._connection.fileno(), _CHUNK_BYTES)
            if not chunk:
                raise EOFError
            self._bytes += chunk
            yield from self._whole()

    def _whole(self) -> Iterator[object]:
        while (span := self._span()) is not None and len(self._bytes) >= span[1]:
            message = bytes(self._bytes[span[0] : span[1]])
            del self._bytes[: span[1]]
            yield pickle.loads(message)

    def _span(self) -> tuple[int, int] | None:
        """Return where the first message begins and ends; None while its length is not known."""
        if len(self._bytes) < _SHORT.size:
            return None
        (length,) = _SHORT.unpack_from(self._bytes)
        begin = _SHORT.size
        if length == -1:
            if len(self._bytes) < begin + _LONG.size:
                return None
            (length,) = _LONG.unpack_from(self._bytes, begin)
            begin += _LONG.size
        return begin, begin + length
