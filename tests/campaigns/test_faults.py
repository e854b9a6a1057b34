"""A short campaign of faults misses no target, and each of its checks can fail."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns import faults
from campaigns.fault_checks import check_worlds, complaint
from campaigns.fault_damage import cut_one
from campaigns.fault_kinds import Fault, Kind, Miss
from campaigns.live_run import LiveRun
from tests.shell import ROOT, python

WORLD = "observations/main/torch.ddp/threads-2/mlp"
LINES = {
    verdict: json.dumps(
        {"verdict": verdict, "observation": WORLD, "case": "c", "world": "threads:2", "headline": "why"}
    )
    for verdict in ("PASSED", "CRASHED")
}


@pytest.mark.slow
def test_a_short_campaign_misses_no_target() -> None:
    done = python("-m", "campaigns.faults", "--faults", "8", "--seed", "173", limit_s=115)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults tried, 8 done, " in done.stdout


@pytest.mark.parametrize(("verdict", "misses"), [("PASSED", [Miss.FALSE_GREEN]), ("CRASHED", [])])
def test_a_case_that_passed_though_its_host_was_killed_is_a_false_green(
    verdict: str, misses: list[Miss]
) -> None:
    fault = Fault(kind="SIGKILL to host of threads", is_done=True, worlds=(f"/somewhere/{WORLD}",))
    check_worlds([fault], [LINES[verdict]])
    assert fault.verdicts == (verdict,)
    assert [miss for miss, _ in fault.misses] == misses


def test_a_fault_that_found_no_target_proves_nothing() -> None:
    fault = Fault(kind="SIGKILL to host of threads", worlds=(f"/somewhere/{WORLD}",))
    check_worlds([fault], [LINES["PASSED"]])
    assert fault.misses == []


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[LiveRun]:
    """Make a run that has ended, without a record."""
    run = LiveRun(tmp_path / "sp", ["--engine", "torch.ddp", "--suite", "no such suite"])
    assert run.ended(60.0) == 2
    yield run
    run.end()


def test_leftovers_of_a_run_are_found(ended: LiveRun) -> None:
    (ended.temporary / "pymp-x").mkdir()
    (ended.temporary / "pytest-of-me").mkdir()
    assert ended.litter() == ["pymp-x"]
    orphan = subprocess.Popen(["sleep", "600"], env={"PATH": "/usr/bin:/bin", "TMPDIR": str(ended.temporary)})
    # Popen returns while the kernel still loads the program: until then /proc shows no environment.
    ended.wait_until(lambda: bool(ended.processes()), 60.0)
    assert [found.pid for found in ended.orphans(0.0)] == [orphan.pid]
    ended.end()
    assert orphan.wait(10) < 0


def test_the_table_counts_each_kind_of_miss() -> None:
    kind = str(Kind(role="run", number=signal.SIGINT))
    rendered = faults.table([Fault(kind=kind, is_done=True, misses=[(Miss.LOST, "one")]), Fault(kind=kind)])
    assert [line.split() for line in rendered.splitlines()[2:]] == [
        ["SIGINT", "to", "run", "1", "2", "0", "0", "0", "1", "0", "0"],
        ["all", "1", "2", "0", "0", "0", "1", "0", "0"],
    ]


def test_a_command_that_raises_is_a_complaint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(_: object) -> int:
        raise KeyError("schema")

    assert complaint("report", str(tmp_path)) == ""
    monkeypatch.setattr("campaigns.fault_checks.main", fails)
    assert complaint("report", str(tmp_path)) == "report raised KeyError: 'schema'"


def test_a_cut_that_costs_another_record_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "observations" / "w").mkdir(parents=True)
    (run / "observations" / "w" / "outcomes.json").touch()
    for name in ("records.jsonl", "run.jsonl", "SHA256SUMS"):
        shutil.copy(ROOT / "tests" / "cli" / "test_cli.py", run / name)
    monkeypatch.setattr("campaigns.fault_damage._OF_A_RUN", ("records.jsonl",))
    monkeypatch.setattr("campaigns.fault_damage.complaint", lambda *_: "")
    monkeypatch.setattr("campaigns.fault_damage.call", lambda *_: (0, ""))
    monkeypatch.setattr("campaigns.fault_damage.read_run", lambda _: type("Run", (), {"records": ()}))
    fault = cut_one(run, tmp_path, random.Random(1))
    assert {miss for miss, _ in fault.misses} == {Miss.FALSE_GREEN, Miss.LOST}
