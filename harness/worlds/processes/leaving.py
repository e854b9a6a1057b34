"""Ends a host once its ranks have returned, as a training script ends, except for the interpreter's last steps.

[Note: leaving] A script that has reached its last line waits for its non-daemon threads, runs its exit hooks, and ends
with a status. An engine can hang or crash in each of these after correct results, and a user then waits for a job that
never ends. So a host does the same. It does not finalize the interpreter: threads of a backend that still run in C++
sometimes crash there, through no fault of an engine (pytorch#179291), and multiprocessing's and torch's own launchers
leave by `os._exit` too. Hooks of modules that the fork server imported do not run, because they belong to the server.

A host sends `Leaving` first and `Done` last. An exit status of zero proves nothing by itself: a hook that calls
`os._exit(0)` hides all later hooks. Then the host waits until its supervisor dismisses it. So the processes that it
leaves are looked up while it is alive, and each is known to be below this host.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from multiprocessing import util
from typing import NoReturn

from shardproof.harness.tracing.current_rank import owner_of
from shardproof.harness.worlds.messages import Done, LastThread, Leaving
from shardproof.harness.worlds.processes.supervisor_link import SupervisorLink

_exit = os._exit  # an engine may replace functions that are looked up later


def start_afresh() -> None:
    """Clear the exit hooks of the fork server, except the one that ends multiprocessing's daemonic workers."""
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # it has no public name


def await_threads(link: SupervisorLink) -> None:
    """Wait without limit for the threads that a script would wait for; the supervisor enforces the deadline."""
    link.send(Leaving(ident=threading.get_ident(), threads=tuple(_threads())))
    # The interpreter's own way: it also ends the idle threads of executors, which are no daemons either.
    threading._shutdown()  # type: ignore[attr-defined]  # it has no public name


def leave(link: SupervisorLink) -> NoReturn:
    """Run the exit hooks, report `Done`, wait for the dismissal, and end the process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A rank may have closed or removed them.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    link.send(Done())
    link.jobs.get()
    _exit(0)


def _threads() -> list[LastThread]:
    return [
        LastThread(name=thread.name, ident=thread.ident or 0, rank=owner_of(thread))
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
