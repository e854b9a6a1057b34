"""Calls a function in a fresh process, which returns bytes within a deadline. No torch here.

[Note: why aside] An engine's module may patch torch when it is imported. An oracle in the same process would then be
wrong in the same way, and agree. So the judging process imports no engine: engines live in their worlds, and queries
about them run in a separate process. The answer is data: reading it runs no code of the process that sent it.
"""

from __future__ import annotations

import faulthandler
import os
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, ParamSpec

from shardproof.harness.errors import HarnessBug
from shardproof.harness.worlds.processes.forkserver import end, forkserver_context, started

P = ParamSpec("P")

_LENGTH = struct.Struct("!Q")
_PIECE = 2**20  # bytes read at once
# The process prints its stacks before it is ended, after this fraction of the deadline.
_PATIENCE = 0.9


class NoAnswerError(Exception):
    """The process ended, was too slow, or sent too much; the text says which."""


def ask(
    limit_s: float, longest: int, function: Callable[P, bytes], *args: P.args, **kwargs: P.kwargs
) -> bytes:
    """Call a module-level function in a fresh fork of the warm server; returns the bytes that it returns.

    Raises NoAnswerError if they have not arrived after ``limit_s``, or are more than ``longest``. The process outlives
    neither the call nor the calling process.
    """
    ours, theirs = forkserver_context().Pipe(duplex=False)
    try:
        process = started(_answer, theirs, limit_s, function, args, kwargs, limit_s=limit_s)
    except HarnessBug as error:
        ours.close()
        raise NoAnswerError(f"could not be started: {error}") from None
    finally:
        theirs.close()
    try:
        return _receive(ours, time.monotonic() + limit_s, longest)
    except EOFError:
        process.join(1.0)
        raise NoAnswerError(f"ended without an answer{_exit(process.exitcode)}") from None
    except TimeoutError:
        raise NoAnswerError(f"took longer than {limit_s:.0f} s; its stacks are printed above") from None
    finally:
        ours.close()
        end(process)


def _receive(connection: Connection, limit: float, longest: int) -> bytes:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, limit))
    if length > longest:
        raise NoAnswerError(f"answered with {length} bytes, and {longest} are the most")
    return _read(connection, length, limit)


def _read(connection: Connection, length: int, limit: float) -> bytes:
    """Read this many bytes, piece by piece: a process that stops in the middle must not exceed its deadline."""
    found = bytearray()
    while len(found) < length:
        if not connection.poll(max(0.0, limit - time.monotonic())):
            raise TimeoutError
        piece = os.read(connection.fileno(), min(_PIECE, length - len(found)))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def _exit(code: int | None) -> str:
    if code is None:
        return ""
    return f", by signal {-code}" if code < 0 else f", with exit status {code}"


# Any: the arguments of the function.
def _answer(
    connection: Connection, limit_s: float, function: Callable[..., bytes], args: Any, kwargs: Any
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.dump_traceback_later(limit_s * _PATIENCE)
    answer = function(*args, **kwargs)
    left = memoryview(_LENGTH.pack(len(answer)) + answer)
    while left:
        left = left[os.write(connection.fileno(), left) :]
    os._exit(0)  # threads or exit handlers of an engine must not delay the end of this process


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
