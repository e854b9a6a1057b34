"""What a world needs of the machine: a loopback interface, file descriptors, room; nothing here is about engines."""

from __future__ import annotations

import errno
import socket

from shardproof.harness.errors import MachineError

_LIMIT_S = 2.0
# By the error of a system call, what the machine lacks and what to try.
_LACKS = {
    errno.EMFILE: ("another file descriptor for this process", "a higher `ulimit -n`, or fewer workers"),
    errno.ENFILE: ("another file descriptor", "ending other programs"),
    errno.ENOSPC: ("room on a disk or in shared memory", "freeing space, or another TMPDIR or --out"),
    errno.EDQUOT: ("room within the quota", "freeing space, or another TMPDIR or --out"),
    errno.ENOMEM: ("memory for another process", "fewer workers, or smaller worlds"),
    errno.EAGAIN: ("another process or thread", "a higher `ulimit -u`, or fewer workers"),
}


def machine_fault(error: BaseException) -> MachineError | None:
    """Return what the machine lacks if that is why a world, an oracle or a file could not be made, else None."""
    if isinstance(error, MachineError):
        return error
    if not isinstance(error, OSError) or error.errno not in _LACKS:
        reason = error.__cause__ or error.__context__
        return None if reason is None else machine_fault(reason)
    lacking, hint = _LACKS[error.errno]
    return MachineError("this machine", expected=lacking, got=f"{type(error).__name__}: {error}", hint=hint)


def require_loopback() -> None:
    """Raise MachineError unless two sockets of this machine reach each other, as ranks on the CPU do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LIMIT_S).close()
    except OSError as error:
        raise MachineError(
            "this machine",
            expected="a loopback interface, by which processes of one world reach each other",
            got=f"{type(error).__name__}: {error}",
            hint="`ip link set lo up`, or a world of threads",
        ) from error
