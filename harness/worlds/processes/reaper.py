"""The reaper of the fork server: a small process between the session and the server; imported for its effect.

[Note: the reaper] The server imports this module before all others. The import forks: the child continues as the
server, the parent stays as its reaper. A reaper adopts every orphan below it. So a process that leaves its session is
still found, as a child of the reaper, if its parents have ended or its rank was killed. When the session or the server
ends, for any reason, the reaper ends all processes below it. No engine's code runs here. There is one reaper per
session, forked before any large import, so that it costs a world nothing.

On a kernel where no process can adopt orphans the import does nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import NoReturn

from shardproof.harness.worlds.processes.lineage import adopt_orphans, below, die_with_parent, signalled

# SIGKILL needs no cooperation; a process that the kernel cannot end at once must not keep the reaper for ever.
_END_LIMIT_S = 5.0
_POLL_S = 0.01
# How often the reaper checks whether its session has ended, on a kernel that cannot wake it for that.
_LOOK_S = 1.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _keep() -> None:
    """Split into the reaper, which never returns, and the server, which continues."""
    session = os.getppid()
    if not adopt_orphans():
        return
    reaper = os.getpid()
    folder, alive = _folder_of_listener(), _alive_pipe()
    # A signal to the session's whole group, such as Ctrl-C in a terminal, reaches neither: the session ends first.
    os.setsid()
    server = os.fork()
    if server:
        _watch(session, server, folder, alive)
    die_with_parent()
    if os.getppid() != reaper:
        os._exit(1)


def _watch(session: int, server: int, folder: Path | None, alive: int) -> NoReturn:
    """Reap ended processes until the session or the server has ended; then end the rest.

    The end of ``alive`` reveals a session that ended before this process read its parent's pid.
    """
    for number in _IGNORED:  # they are meant for the session; the reaper waits for the session's end
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, alive)
    os.closerange(alive + 1, os.sysconf("SC_OPEN_MAX"))
    woken = _wake_on_child()
    end = _end_of(session)
    watched = [woken, alive] if end is None else [woken, alive, end]
    is_over = False
    while not is_over:
        ready, _, _ = select.select(watched, [], [], _LOOK_S if end is None else None)
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        is_orphaned = end in ready or alive in ready or os.getppid() != session
        is_over = is_orphaned or server in _reaped()
    _end_all()
    if is_orphaned and folder is not None:
        # The session would have removed it at its exit.
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _alive_pipe() -> int:
    """Return the descriptor that multiprocessing gave the server, readable once no process holds its other end."""
    (command,) = (argument for argument in sys.orig_argv if "multiprocessing.forkserver" in argument)
    return int(command.partition("main(")[2].split(",")[1])


def _wake_on_child() -> int:
    """Return a file descriptor that is readable once a child has ended."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    os.write(writes, b"\0")  # children that ended before this are reaped too
    return reads


def _end_of(pid: int) -> int | None:
    """Return a file descriptor that is readable once a process has ended; None on a system without pidfds."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _reaped() -> list[int]:
    """Reap every child that has ended, adopted ones included; returns their pids."""
    pids: list[int] = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            pids.append(pid)
    return pids


def _end_all() -> None:
    limit = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < limit and (rest := below(os.getpid())):
        for process in rest:
            signalled(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        _reaped()


def _folder_of_listener() -> Path | None:
    """Return the temporary folder that multiprocessing made for the server's socket."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as listener:
                address = listener.getsockname()
                is_listener = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            if is_listener and isinstance(address, str) and Path(address).parent.name.startswith("pymp-"):
                return Path(address).parent
    return None


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    gc.disable()  # until all is imported: the collector would find no garbage, and takes a tenth of the time
    os.dup2(2, 1)  # output of modules at import is not part of the session's output
    _keep()
