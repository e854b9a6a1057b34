"""Connects the processes of a launcher: process 0 judges and supervises, each other one becomes its rank's agent.

[Note: trust] They find each other in the launcher's store, where process 0 publishes a port and a token. An agent obeys
pickled commands of the process at that port. The replies are data, as from a host, and count only after the token.
"""

from __future__ import annotations

import atexit
import json
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from shardproof.harness.errors import HarnessBug, UsageError
from shardproof.harness.worlds.launched.agent_link import AgentLink, Command
from shardproof.harness.worlds.launched.launcher import LaunchedProcess, rank_environment
from shardproof.harness.worlds.messages import Hello, Inbox

if TYPE_CHECKING:
    from shardproof.harness.torch_compat.process_groups import Store

_KEY = "shardproof"
# Launchers start their processes together; imports on a cold disk take tens of seconds.
_MEETING_LIMIT_S = 120.0
_HELLO_LIMIT_S = 10.0
_WARM_LIMIT_S = 120.0
# Short network outages pass; a switch that restarts takes longer, as does a lost machine.
_SILENCE_LIMIT_S = 30
_PROBE_S = 5


class Cluster:
    """All processes of the launcher, in process 0."""

    def __init__(self, process: LaunchedProcess, links: Mapping[int, AgentLink]) -> None:
        self.process = process
        self.links = links
        self._is_warm = False
        own = (socket.gethostname(), process.node, process.local_rank)
        others = {rank: (a.hello.host, a.hello.node, a.hello.local_rank) for rank, a in links.items()}
        self._places = {0: own, **others}

    def host(self, rank: int) -> str:
        """Return the name of a rank's machine."""
        return self._places[rank][0]

    @property
    def hosts(self) -> str:
        """List the machines with their ranks."""
        ranks: dict[tuple[str, str], list[str]] = {}
        for rank in sorted(self._places):
            ranks.setdefault(self._places[rank][:2], []).append(str(rank))
        return "; ".join(f"{host}: {', '.join(numbers)}" for (host, _), numbers in ranks.items())

    @property
    def lost(self) -> str:
        """Return which agents are lost, and why; empty if none is."""
        for agent in self.links.values():
            agent.listen()
        return "; ".join(
            f"rank {rank} on {agent.hello.host} is lost: {agent.why_lost}"
            for rank, agent in self.links.items()
            if agent.why_lost
        )

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """Return a launcher's variables for a rank of a world of the first ``size`` ranks, except the port."""
        host, node, local_rank = self._places[rank]
        together = [r for r in range(size) if self._places[r][:2] == (host, node)]
        given = rank_environment(
            rank, size, local_rank=local_rank, local_size=len(together), address=self.process.address
        )
        # The port is no longer that of torchrun's store.
        return {**given, "TORCHELASTIC_USE_AGENT_STORE": "False"}

    def await_warm(self) -> None:
        """Wait until all agents can start hosts; raises HarnessBug if one cannot."""
        for rank, agent in self.links.items() if not self._is_warm else ():
            agent.await_answer(1, _WARM_LIMIT_S)
            if agent.state.answered < 1 or agent.state.error:
                raise HarnessBug(
                    f"the agent of rank {rank} on {agent.hello.host}",
                    expected=f"a fork server within {_WARM_LIMIT_S:.0f} s",
                    got=agent.why_lost or agent.state.error or "nothing",
                    hint="`shardproof doctor` on that machine",
                )
        self._is_warm = True

    def close(self) -> None:
        """Let all agents leave."""
        for agent in self.links.values():
            agent.send("leave")


_cluster: list[Cluster] = []  # at most one


def cluster() -> Cluster | None:
    """Return the cluster that this process supervises; None if no launcher started it."""
    return _cluster[0] if _cluster else None


def open_cluster(process: LaunchedProcess, seed: int) -> Cluster:
    """Connect to all agents, once per process; raises UsageError if one is missing, or has other releases."""
    if not _cluster:
        _cluster.append(Cluster(process, _join(process)))
        for agent in _cluster[0].links.values():
            agent.send("warm", seed)
        atexit.register(_cluster[0].close)
    return _cluster[0]


def meet_supervisor(process: LaunchedProcess) -> tuple[Connection, str]:
    """Connect an agent to process 0; returns the connection and the token with which the agent introduces itself.

    Raises UsageError if process 0 cannot be reached.
    """
    try:
        found = json.loads(_store(process).get(_KEY))
        link = socket.create_connection((process.address, found["port"]), timeout=_MEETING_LIMIT_S)
    except (OSError, RuntimeError) as error:  # torch's network errors are RuntimeErrors
        raise UsageError(
            f"process {process.rank} of {process.launcher}",
            expected=f"process 0 at {process.address} within {_MEETING_LIMIT_S:.0f} s",
            got=str(error).partition("\n")[0],
            hint="what process 0 has printed",
        ) from error
    return connect(link), str(found["token"])


def releases() -> str:
    """Name the releases that must be equal on all machines."""
    return f"python {platform.python_version()}, torch {version('torch')}, shardproof {version('shardproof')}"


def _join(process: LaunchedProcess) -> dict[int, AgentLink]:
    token, links = secrets.token_hex(16), dict[int, AgentLink]()
    limit = time.monotonic() + _MEETING_LIMIT_S
    store = _store(process)  # this reference keeps a store of our own alive until the end of this function
    with socket.create_server(("", 0), backlog=process.size) as server:
        store.set(_KEY, json.dumps({"port": server.getsockname()[1], "token": token}))
        while len(links) < process.size - 1 and (left := limit - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(TimeoutError):
                agent = _greeted(connect(server.accept()[0]), token)
                if agent is not None:
                    links[agent.hello.rank] = agent
    missing = sorted({*range(1, process.size)} - links.keys())
    others = {rank: a.hello for rank, a in links.items() if a.hello.releases != releases()}
    if missing or others:
        rank, alien = min(others.items()) if others else (0, None)
        raise UsageError(
            "--world launched",
            expected=f"all {process.size} processes of {process.launcher}, with {releases()}",
            got=f"{alien.releases} of rank {rank} on {alien.host}"
            if alien
            else f"nothing from rank(s) {missing} within {_MEETING_LIMIT_S:.0f} s",
            hint="the same command and the same installation on all machines, and an open network between them",
        )
    return dict(sorted(links.items()))


def _greeted(connection: Connection, token: str) -> AgentLink | None:
    """Return the link to the agent at the other end, None if there is none; measures its clock offset."""
    inbox, sent_s = Inbox(connection), time.monotonic()
    with suppress(OSError, EOFError):
        connection.send(Command(number=0, method="greet", args=()))
        if connection.poll(_HELLO_LIMIT_S):
            for message in inbox.read():
                if isinstance(message, Hello) and secrets.compare_digest(message.token, token):
                    behind_s = (sent_s + time.monotonic()) / 2 - message.clock_s
                    return AgentLink(connection, message, inbox, behind_s)
    connection.close()
    return None


def _store(process: LaunchedProcess) -> Store:
    """Return the store of the launcher; if it has none, process 0 opens one at the launcher's port."""
    from torch.distributed.rendezvous import rendezvous  # here, because it imports torch

    url = f"tcp://{process.address}:{process.port}"
    limit = timedelta(seconds=_MEETING_LIMIT_S)
    store: Store = next(rendezvous(url, process.rank, process.size, timeout=limit))[0]
    return store


def connect(link: socket.socket) -> Connection:
    """Return a connection that ends when the machine at its other end is silent for too long."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A lost machine closes no connection: the kernel reports that it no longer answers.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_LIMIT_S)
    return Connection(link.detach())
