"""Only processes that ranks left are leftovers, whether or not the processes between have ended."""

from __future__ import annotations

import errno
import os
import signal
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardproof import TrialSession
from shardproof.harness.cli.machine_examination import examine
from shardproof.harness.errors import MachineError
from shardproof.harness.records.record import Verdict
from shardproof.harness.worlds.machine import machine_fault, require_loopback
from shardproof.harness.worlds.processes import leaked_processes, lineage
from shardproof.harness.worlds.processes.host_handle import HostHandle
from shardproof.harness.worlds.processes.leaked_processes import LeakedProcesses
from shardproof.harness.worlds.processes.lineage import Process, below, signalled
from tests.judging import judged

SESSION, REAPER, SERVER, HOST, ORPHAN, STRANGER = (
    os.getpid(),
    1_000_002,
    1_000_003,
    1_000_004,
    1_000_005,
    1_000_006,
)
WHOLE = {SESSION: 1, REAPER: SESSION, SERVER: REAPER, HOST: SERVER, ORPHAN: REAPER, STRANGER: 1, 1: 0}


def seen_in(monkeypatch: pytest.MonkeyPatch, parents: dict[int, int]) -> list[int]:
    """Return the orphans found in a tree of processes, which maps each process to its parent."""

    def looked_up(pid: int) -> Process | None:
        if pid not in parents:
            return None
        return Process(pid=pid, parent=parents[pid], session=pid, started_ticks=pid, is_running=True)

    monkeypatch.setattr(lineage, "process_of", looked_up)
    monkeypatch.setattr(leaked_processes, "process_of", looked_up)
    monkeypatch.setattr(
        lineage, "_children", lambda pid: [p for p, parent in parents.items() if parent == pid]
    )
    host = cast(HostHandle, SimpleNamespace(pid=HOST))
    found: list[Any] = LeakedProcesses([host])._orphans()
    return [process.pid for process in found]


def test_a_process_that_the_keeper_adopted_is_an_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_in(monkeypatch, WHOLE) == [ORPHAN]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({REAPER: None, SERVER: 1, ORPHAN: 1}, id="the reaper was killed"),
        pytest.param({SERVER: None, HOST: REAPER}, id="the server was killed"),
        pytest.param({REAPER: None, SERVER: None, HOST: 1, ORPHAN: 1}, id="both were killed"),
        pytest.param({REAPER: None, SERVER: SESSION, ORPHAN: 1}, id="the machine lets no process adopt"),
    ],
)
def test_nothing_else_on_the_machine_is_an_orphan(
    monkeypatch: pytest.MonkeyPatch, changed: dict[int, int | None]
) -> None:
    parents = {pid: parent for pid, parent in (WHOLE | changed).items() if parent is not None}
    assert seen_in(monkeypatch, parents) == []


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_no_signal_goes_to_the_first_process_or_to_all(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    assert not signalled(pid, signal.SIGKILL)
    assert sent == []
    assert below(pid) == []


# What the machine lacks.


def _unreachable(*_: object, **__: object) -> socket.socket:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


def test_a_loopback_interface_is_there() -> None:
    require_loopback()


def test_a_machine_without_loopback_is_named(session: TrialSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.create_connection", _unreachable)
    record = judged(session, "torch.ddp", "processes:2")
    assert record.verdict is Verdict.ERRORED
    assert record.headline.startswith("this machine: expected a loopback interface")
    assert "ip link set lo up" in record.headline
    failed = {finding.what for finding in examine() if not finding.is_ok}
    assert {"loopback", "world processes:2"} <= failed


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENOMEM])
def test_a_lack_behind_another_error_is_found(number: int) -> None:
    try:
        try:
            raise OSError(number, "lacking")
        except OSError as lack:
            raise ValueError("could not go on") from lack
    except ValueError as error:
        fault = machine_fault(error)
    assert isinstance(fault, MachineError)
    assert "lacking" in str(fault)


def test_other_errors_are_not_the_machines() -> None:
    assert machine_fault(ValueError("wrong")) is None
    assert machine_fault(FileNotFoundError(errno.ENOENT, "no such file")) is None
