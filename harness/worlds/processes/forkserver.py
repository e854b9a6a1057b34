"""The fork servers: warm processes of a session, from which every host is forked.

[Note: a server per rank] Python draws the seed of its string hashes, and with it the order of sets, when it starts. On
a cluster each rank has its own seed, so an engine that communicates in the order of a set does so differently on each
rank. A fork has the seed of its server. So each rank of a world of processes has a server of its own, which starts on
first use. Processes that are not ranks are forks of the first server. From rank 16 on ranks share the seeds of earlier
ones, so that a large world does not import torch a hundred times. Threads of one process share a seed.

[Note: a server that does not answer] A server may be stopped, killed, or stuck in its imports. So each wait for it has
a limit. A server that exceeds one is ended with its reaper and all processes below them. The next call starts another.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from shardproof.harness.errors import HarnessBug
from shardproof.harness.worlds.processes.lineage import below, has_ended, signalled

# The exit code that multiprocessing reports if the fork server has ended before the process.
STATUS_WITHOUT_SERVER = 255

_REAPER = "shardproof.harness.worlds.processes.reaper"
_WARM = "shardproof.harness.runner.preload"
_ROOT = Path(__file__).parents[4]  # the folder that contains the package
# The imports of a new server take seconds; on a cold disk tens of seconds.
_IMPORTS_LIMIT_S = 60.0
# SIGKILL needs no cooperation; this only bounds a wait that should be instant.
_END_LIMIT_S = 5.0
# A server reports the end of a process in milliseconds; a busy machine may need longer.
REPORT_LIMIT_S = 1.0
_POLL_S = 0.01


_MAX_SERVERS = 16

# Any: multiprocessing has no public name for a server; the first is its own.
_servers: list[Any] = [forkserver._forkserver, *(forkserver.ForkServer() for _ in range(1, _MAX_SERVERS))]
_preloaded: list[tuple[str, ...]] = [()]  # for each 16 servers, their additional imports
_server_of: WeakKeyDictionary[ForkServerProcess, int] = WeakKeyDictionary()
_connecting = threading.Lock()
_seed, _first = 0, 0


def draw_hash_seeds(seed: int, first: int = 0) -> None:
    """Draw the hash seeds of a session; end servers with others. ``first`` gives the first server another seed."""
    global _seed, _first
    if (seed, first) != (_seed, _first):
        for number in range(len(_servers)):
            end_server(number)
    _seed, _first = seed, first


def server_of(rank: int, preload: tuple[str, ...] = ()) -> int:
    """Return the number of a rank's server; neighbours have different ones, and so have ranks that are 16 apart.

    Modules in an engine's ``preload`` are imported by separate servers, so that oracles and other engines never see
    them.
    """
    if preload not in _preloaded:
        _preloaded.append(preload)
        _servers.extend(_to_import(forkserver.ForkServer(), preload) for _ in range(_MAX_SERVERS))
    return _preloaded.index(preload) * _MAX_SERVERS + (rank + rank // _MAX_SERVERS) % _MAX_SERVERS


def hash_seeds(seed: int) -> tuple[int, ...]:
    """Return ``PYTHONHASHSEED`` of each server, for the seed of a session's first schedule."""
    return tuple(random.Random(f"{seed}/{server}").randrange(1, 2**32) for server in range(_MAX_SERVERS))


@cache
def forkserver_context() -> ForkServerContext:
    """Return the context whose processes are forks of a warm server; starts the first server on first use."""
    for server in _servers[:_MAX_SERVERS]:
        _to_import(server)
    _ensure_server(0)
    return multiprocessing.get_context("forkserver")


def started(function: Callable[..., None], *args: Any, limit_s: float, server: int = 0) -> ForkServerProcess:
    """Start ``function(*args)`` in a fork of a server, by default the first.

    The fork does not import the caller's main module, as multiprocessing would: a script may be slow or unsafe to
    import. So the function and its arguments must come from importable modules.

    Raises HarnessBug if the fork has not started after ``limit_s``. A new server has a minute more for its imports. A
    server that has ended is replaced once.
    """
    try:
        return _start(function, args, limit_s, server)
    except (OSError, EOFError):  # the server has ended, but its reaper perhaps had not
        end_server(server)
    try:
        return _start(function, args, limit_s, server)
    except (OSError, EOFError) as error:
        end_server(server)
        raise _no_server(f"{type(error).__name__}: {error}") from error


def end(process: ForkServerProcess) -> None:
    """Kill a process that `started` returned, wait for its end, and release it."""
    kill(process)
    if process.exitcode is not None:
        process.close()


def kill(process: ForkServerProcess) -> None:
    """Kill a process that `started` returned, and wait for its end; also ends a server that does not report it."""
    pid = process.pid or 0
    process.kill()
    limit = time.monotonic() + _END_LIMIT_S
    while process.exitcode is None and not has_ended(pid) and time.monotonic() < limit:
        process.join(_POLL_S)
    process.join(REPORT_LIMIT_S)
    if process.exitcode is None:
        end_server(_server_of.get(process, 0))
        process.join(_END_LIMIT_S)
    if process.exitcode == STATUS_WITHOUT_SERVER and not has_ended(pid):
        signalled(pid, signal.SIGKILL)  # multiprocessing takes it for ended; its reaper was killed too


def end_server(server: int = 0) -> None:
    """End a server, its reaper and all processes below them, whatever their state."""
    reaper = _pid(server)
    if reaper is None:
        return
    limit = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < limit and (rest := below(reaper)):
        for process in rest:
            signalled(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    signalled(reaper, signal.SIGKILL)
    while time.monotonic() < limit and not has_ended(reaper):
        time.sleep(_POLL_S)


def warm_up(limit_s: float = _IMPORTS_LIMIT_S, *, num_ranks: int = 1) -> None:
    """Wait until the servers of this many ranks have done their imports, so that no case is charged for them."""
    forkserver_context()
    servers = range(min(num_ranks, _MAX_SERVERS))
    for server in servers:
        _ensure_server(server)
    for server in servers:
        process = started(_nothing, limit_s=limit_s, server=server)
        process.join(limit_s)
        end(process)


class _Patience(threading.Thread):
    """A watchdog: ends the server unless cancelled within ``limit_s``, which ends every wait for it.

    A server that may still be importing gets a minute, unless it is stopped.
    """

    def __init__(self, number: int, server: int | None, limit_s: float) -> None:
        super().__init__(daemon=True)
        self._number = number
        self._server = server
        self.limit_s = limit_s
        self.is_over = False
        self._is_answered = threading.Event()

    def run(self) -> None:
        more_s = 0.0 if self._server in _answered else _IMPORTS_LIMIT_S - self.limit_s
        if self._is_answered.wait(self.limit_s):
            return
        if more_s > 0 and not _is_stopped(self._server):
            self.limit_s += more_s
            if self._is_answered.wait(more_s):
                return
        self.is_over = True
        end_server(self._number)

    def cancel(self) -> None:
        """Stop the watchdog: the server has answered, or no answer is needed any more."""
        self._is_answered.set()


def _is_stopped(reaper: int | None) -> bool:
    return reaper is not None and any(process.is_stopped for process in below(reaper))


_answered: set[int] = set()  # the servers that have done their imports, by pid


def _start(
    function: Callable[..., None], args: tuple[Any, ...], limit_s: float, number: int
) -> ForkServerProcess:
    process = forkserver_context().Process(target=function, args=args)
    _server_of[process] = number
    _ensure_server(number)
    server = _pid(number)
    patience = _Patience(number, server, limit_s)
    patience.start()
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    failure: OSError | EOFError | None = None
    try:
        with _connected_to(number):
            process.start()
    except (OSError, EOFError) as error:
        failure = error
    finally:
        sys.modules["__main__"] = main
        patience.cancel()
    patience.join()
    if patience.is_over:
        raise _no_server(f"nothing within {patience.limit_s:g} s") from failure
    if failure is not None:
        raise failure
    if server is not None:
        _answered.add(server)
    return process


def _to_import(server: Any, modules: Iterable[str] = ()) -> Any:
    """Set a server's imports, in order: see [Note: the reaper]; `_WARM` draws no seed that others change."""
    server.set_forkserver_preload([_REAPER, *modules, _WARM])
    return server


@contextmanager
def _connected_to(number: int) -> Iterator[None]:
    """Make multiprocessing fork from this server: it looks the function up where a process starts."""
    with _connecting:
        first = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _servers[number].connect_to_new_process
        try:
            yield
        finally:
            forkserver.connect_to_new_process = first


def _ensure_server(number: int = 0) -> None:
    """Start a server unless it runs.

    The server has an environment of its own: one OpenMP thread, because a fork of a process that ran an OpenMP region
    with more threads hangs; a path that contains the package, because the server does not inherit the parent's; and its
    hash seed.
    """
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    seed = hash_seeds(_seed)[(number + _first) % _MAX_SERVERS]
    wanted = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        _servers[number].ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _pid(number: int = 0) -> int | None:
    """Return the process that multiprocessing started: the reaper where there is one, else the server."""
    pid: int | None = _servers[number]._forkserver_pid
    return pid


def _no_server(got: str) -> HarnessBug:
    return HarnessBug(
        "the fork server",
        expected="a new process",
        got=got,
        hint="the command again; `shardproof doctor` if it comes back",
    )


def _nothing() -> None:
    """Do nothing; the server forks this only after its imports."""
