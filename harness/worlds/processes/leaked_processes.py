"""Finds the processes that ranks leave behind anywhere in the process tree, names them, and ends them.

While a host lives it is the parent of all orphans below it; once it has ended the reaper is (see [Note: the reaper]).
On a system where no process can adopt orphans only the process group of a host is searched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence

from shardproof.harness.worlds.processes.host_handle import HostHandle
from shardproof.harness.worlds.processes.lineage import (
    Process,
    below,
    command,
    is_running,
    parent_of,
    process_of,
    signalled,
)

# How long a process may outlive its rank. A process that ends because a pipe of the rank was closed, as
# multiprocessing's resource tracker does, needs a moment.
_GRACE_S = 0.5
_END_LIMIT_S = 5.0  # SIGKILL needs no cooperation; this only bounds a wait that should be instant
_POLL_S = 0.005
_LONGEST_NAME = 60


class LeakedProcesses:
    """The processes that the ranks of one world started, while they run."""

    def __init__(self, hosts: Sequence[HostHandle]) -> None:
        self._hosts = tuple(hosts)
        servers = {server for host in hosts if (server := parent_of(host.pid)) is not None}
        self._servers = tuple(sorted(servers))
        self._reapers = {s: reaper for s in self._servers if (reaper := _reaper_of(s)) is not None}
        self._seen: dict[HostHandle, list[Process]] = {}
        self._before = {process.pid for process in self._orphans()}

    def look(self, host: HostHandle) -> None:
        """Record the processes below a host that is still alive."""
        self._seen[host] = below(host.pid)

    def end(self) -> tuple[str, ...]:
        """End all processes that are left; returns a text for each host with leaks whose ranks ended by themselves."""
        limit = time.monotonic() + _GRACE_S
        while time.monotonic() < limit and self._left():
            time.sleep(_POLL_S)
        leaks = [
            f"{_ranks(ranks)} left processes behind: {', '.join(names)}"
            for ranks, names in self._left().items()
        ]
        limit = time.monotonic() + _END_LIMIT_S
        for host in self._hosts:
            _end_group(host)
        while time.monotonic() < limit and (rest := [*self._still_running(), *self._orphans()]):
            for process in rest:
                signalled(process.pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        while time.monotonic() < limit and self._is_restarting:
            time.sleep(_POLL_S)
        return tuple(leaks)

    @property
    def _is_restarting(self) -> bool:
        """Return whether a server has ended but its reaper has not: until then no server can be started."""
        return any(not command(server) and is_running(reaper) for server, reaper in self._reapers.items())

    def _left(self) -> dict[tuple[int, ...], list[str]]:
        """Name the processes that ranks left, by rank; processes below a rank that was stopped are no leak."""
        found: dict[tuple[int, ...], list[str]] = {}
        for host, process in self._running_by_host():
            if host.ended_by_itself:
                found.setdefault(host.spec.ranks, []).append(self._name(process))
        for host in () if self._reapers else self._hosts:
            if host.is_over and host.ended_by_itself and _has_group(host):
                found.setdefault(host.spec.ranks, ["some in its process group"])
        return found

    def _running_by_host(self) -> Iterator[tuple[HostHandle, Process]]:
        for host, processes in self._seen.items():
            yield from ((host, process) for process in processes if is_running(process))
        seen = {process.pid for processes in self._seen.values() for process in processes}
        for process in self._orphans():
            if process.pid not in seen | self._before:
                yield self._host_of(process), process

    def _host_of(self, orphan: Process) -> HostHandle:
        """Return the host of an orphan: the host of its session, else the first that ended unseen."""
        of_session = [host for host in self._hosts if host.pid == orphan.session]
        unseen = [host for host in self._hosts if host.is_over and host not in self._seen]
        return (of_session or unseen or list(self._hosts))[0]

    def _still_running(self) -> list[Process]:
        return [process for processes in self._seen.values() for process in processes if is_running(process)]

    def _orphans(self) -> list[Process]:
        return [
            process
            for server, reaper in self._reapers.items()
            if is_running(reaper)
            for process in below(reaper.pid, without=server)
        ]

    def _name(self, process: Process) -> str:
        words = command(process.pid)
        is_fork = not self._servers or words in map(command, self._servers)
        name = "a fork of the rank" if is_fork else repr(words[:_LONGEST_NAME])
        is_detached = all(process.session != host.pid for host in self._hosts)
        return f"{name} in a session of its own" if is_detached else name


def _reaper_of(server: int) -> Process | None:
    """Return the reaper of a server: its parent, and this process's child.

    Without a reaper the server itself is this process's child, and the other children must not be ended. If the reaper
    has just been killed, the server's parent is the machine's first process, which has all processes below it.
    """
    reaper = process_of(parent_of(server) or 0)
    return reaper if reaper is not None and reaper.parent == os.getpid() else None


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _has_group(host: HostHandle) -> bool:
    try:
        os.killpg(host.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _end_group(host: HostHandle) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(host.pid, signal.SIGKILL)
