"""Verdicts blame the machine for what it lacks, in a sentence that says what to try."""

from __future__ import annotations

import errno
import socket

import pytest

from shardproof import TrialSession
from shardproof.harness.cli.machine_examination import examine
from shardproof.harness.errors import MachineError
from shardproof.harness.records.record import Verdict
from shardproof.harness.worlds.machine import machine_fault, require_loopback
from tests.judging import judged


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
