"""Computing something in a process of its own, where no engine can have changed what torch does.

[Note: why aside] An engine's module may patch torch when it is imported. Were the oracle computed where engines
are imported, it would be wrong in the same way, and agree. So the judging process imports no engine: engines
live in their worlds, and what must be known of them is asked aside.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import torch

from harness.errors import HarnessBug
from harness.worlds.forkserver import forkserver_context, started

__all__ = ["aside"]

P = ParamSpec("P")
T = TypeVar("T")


def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a module-level function in a fresh fork of the warm server; raises what it raises.

    Arguments are picklable; the result is anything that ``torch.save`` takes.
    """
    ours, theirs = forkserver_context().Pipe(duplex=False)
    process = started(_run, theirs, function, args, kwargs)
    theirs.close()
    try:
        # weights_only=False: the bytes come from our own fork, and hold our own values.
        result = torch.load(io.BytesIO(ours.recv_bytes()), weights_only=False)
    except EOFError:
        process.join()
        raise HarnessBug(
            f"{getattr(function, '__name__', function)} aside",
            expected="a result",
            got=f"the end of its process, exit code {process.exitcode}",
            hint="`shardproof doctor`, and the messages above",
        ) from None
    finally:
        ours.close()
        process.join()
        process.close()
    if isinstance(result, BaseException):
        raise result
    return result  # type: ignore[no-any-return]  # it went through bytes; it is what the function returned


# Any: whatever `aside` was given.
def _run(connection: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        result: object = function(*args, **kwargs)
    except Exception as error:  # told to the caller, who knows what to make of it
        result = error.with_traceback(None)
        result.__cause__ = None
    buffer = io.BytesIO()
    torch.save(result, buffer)
    connection.send_bytes(buffer.getbuffer())
    connection.close()
