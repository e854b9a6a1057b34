"""Under a launcher of ranks one process judges, and the others lend their ranks."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardproof import UsageError, WorldSpec
from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.launchers import refuse_launcher
from shardproof.harness.worlds.launched.agent_link import AgentLink
from shardproof.harness.worlds.launched.cluster import connect
from shardproof.harness.worlds.launched.launcher import find_launched_process
from shardproof.harness.worlds.messages import FilePiece, Hello, HostState, Inbox, send
from tests.shell import ROOT, python

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TORCHRUN, "process 1 of 2 of torchrun: "),
        ({"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "process 0 of 8 of a launcher of ranks: "),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, "process 3 of 4 of srun: "),
    ],
    ids=["torchrun", "other", "slurm"],
)
def test_one_of_several_processes_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_launcher(environment)
    text = str(caught.value)
    assert text.startswith(words)
    assert "--world launched" in text
    assert "--world processes:" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "8"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "many", "MASTER_ADDR": "a"},
    ],
    ids=str,
)
def test_one_process_may_run(environment: dict[str, str]) -> None:
    refuse_launcher(environment)


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({**TORCHRUN, "MASTER_PORT": "1", "LOCAL_RANK": "1"}, ("torchrun", 1, 2, 1, "localhost")),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[003-004,9]"}, ("srun", 5, 8, 1, "n003")),
        ({**SLURM, "SLURM_STEP_NODELIST": "a,b"}, ("srun", 5, 8, 1, "a")),
        ({**SLURM, **TORCHRUN, "MASTER_PORT": "1"}, ("torchrun", 1, 2, 0, "localhost")),
        (SLURM, None),  # a batch script, which is one process
        ({}, None),
    ],
    ids=["torchrun", "slurm", "slurm, plain names", "torchrun below slurm", "batch", "none"],
)
def test_the_environment_names_the_launcher(
    environment: dict[str, str], expected: tuple[object, ...] | None
) -> None:
    found = find_launched_process(environment)
    assert expected == (found and (found.launcher, found.rank, found.size, found.local_rank, found.address))


def test_without_a_launcher_its_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"^--world launched: .* try torchrun"):
        WorldSpec.parse("launched")
    assert WorldSpec.parse("launched:100").size == 100, "a kept run is judged again anywhere"


@pytest.mark.parametrize(
    "name", ["rank2.observation", "../rank1.observation", "rank1.a/../../b", "run.jsonl"]
)
def test_an_agent_sends_the_files_of_its_rank_alone(name: str, tmp_path: Path) -> None:
    link, theirs = _link()
    link.gathers_to = tmp_path
    send(theirs, FilePiece(name="rank1.ledger.jsonl", start=0, data="YQ=="))
    send(theirs, FilePiece(name=name, start=0, data="YQ=="))
    link.listen()
    assert f"a file that was not asked for: {name!r}" in link.why_lost
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.ledger.jsonl"]


def test_an_agent_that_sends_no_base64_is_lost(tmp_path: Path) -> None:
    link, theirs = _link()
    link.gathers_to = tmp_path
    send(theirs, FilePiece(name="rank1.observation", start=0, data="YQ=\u00e9"))
    link.listen()
    assert "bytes of rank1.observation that cannot be read" in link.why_lost


def test_a_silent_agent_is_lost() -> None:
    link, theirs = _link()
    send(theirs, HostState(answered=1))
    link.ask("kill", limit_s=10)
    assert not link.why_lost
    link.ask("kill", limit_s=0.01)
    assert "did not answer within 0.01 s" in link.why_lost


def test_an_agent_that_has_ended_is_lost() -> None:
    link, theirs = _link()
    theirs.close()
    link.ask("kill", limit_s=10)
    assert "is closed" in link.why_lost or "has ended" in link.why_lost


def test_a_machine_that_is_lost_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    link, theirs = _link()
    theirs.send("")

    def read(inbox: Inbox) -> list[object]:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(Inbox, "read", read)
    link.listen()

    assert link.why_lost == "its machine cannot be reached: Connection timed out"


def test_the_kernel_asks_for_signs_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = connect(socket.create_connection(server.getsockname()))
        with connection, socket.socket(fileno=os.dup(connection.fileno())) as ours:
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
            assert 0 < ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


def _link() -> tuple[AgentLink, Connection]:
    ours, theirs = Pipe()
    hello = Hello(token="", rank=1, host="b", local_rank=0, node="", releases="", folder="/tmp", clock_s=0.0)
    return AgentLink(ours, hello, Inbox(ours), behind_s=0.0), theirs


def _torchrun(
    tmp_path: Path, *command: str, launcher: Iterable[str] = ("--standalone", "--nproc-per-node", "2")
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _records(out: Path) -> dict[str, Record]:
    return {record.engine.rpartition(":")[2]: record for record in read_run(out).records}


CASE = "smoke/test_smoke.py::test_trains_the_same_model"
MUTANT = "shardproof.engine.mutants.gradient_sync:NeverSynchronises"
LOST = "tests/worlds/lost_ranks.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_judge_as_one_machine_does(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    names = ("torch.ddp", f"{LOST}:IsKilled", MUTANT, f"{LOST}:Hangs", "torch.fsdp2")
    engines = [f"--engine={name}" for name in names]
    judge = ("shardproof", "run", "--case", CASE, "--deadline", "15", *engines)
    nodes = [
        _torchrun(
            tmp_path,
            *(*judge, "--out", str(tmp_path / "launched")),
            launcher=("--nnodes=2", f"--node-rank={n}", "--master-addr=127.0.0.1", f"--master-port={port}"),
        )
        for n in (0, 1)
    ]
    printed = [node.communicate(timeout=200)[0] for node in nodes]
    here = ("--world", "processes:2", "--out", str(tmp_path / "here"))
    assert main([*judge[1:], *here]) == 1

    launched, alike = _records(tmp_path / "launched"), _records(tmp_path / "here")

    assert {name: record.verdict for name, record in launched.items()} == {
        "torch.ddp": Verdict.PASSED,
        "IsKilled": Verdict.CRASHED,
        "NeverSynchronises": Verdict.FAILED,
        "Hangs": Verdict.HUNG,
        "torch.fsdp2": Verdict.PASSED,
    }, printed
    host = f" on {socket.gethostname()}"
    for name, record in launched.items():
        assert record.world == "launched:2"
        assert record.headline.replace(host, "") == alike[name].headline
        assert (record.laws, record.ledger, record.worst) == (
            alike[name].laws,
            alike[name].ledger,
            alike[name].worst,
        )
    assert launched["IsKilled"].headline == f"rank 1{host} was killed by SIGKILL"
    assert launched["IsKilled"].outcomes[1].text.startswith(f"on {socket.gethostname()}, log host1.output\n")
    assert "host1:\nabout to be killed" in launched["IsKilled"].output
    assert f"not ended at the deadline: rank(s) [0, 1]{host}" in launched["Hangs"].headline
    name = socket.gethostname()
    assert read_run(tmp_path / "launched").header.hardware["hosts"] == f"{name}: 0; {name}: 1"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_restart_of_the_launcher_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    engines = ("--engine", "torch.ddp", "--engine", f"{LOST}:LosesItsMachine", "--engine", "torch.replicate")
    judge = ("shardproof", "run", "--case", CASE, *engines, "--world", "launched", "--out", str(out))
    launcher = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    printed, _ = _torchrun(tmp_path, *judge, launcher=launcher).communicate(timeout=200)

    first, second = _records(out), _records(tmp_path / "run-restart1")

    assert first["torch.replicate"].verdict is Verdict.NOT_RUN, printed
    assert f"rank 1 on {socket.gethostname()} is lost: " in first["torch.replicate"].headline
    # The loss is noticed in the case, or at the next start of its world.
    assert re.match(rf"rank 1 on {socket.gethostname()} (was|is) lost", first["LosesItsMachine"].headline)
    assert not first["LosesItsMachine"].verdict.is_conforming
    assert second["torch.ddp"].duration_s == first["torch.ddp"].duration_s, "it was not run again"
    assert second["torch.replicate"].verdict is Verdict.PASSED


def _assert_ends_with_a_sentence(code: int | None, printed: str, out: Path) -> None:
    assert code != 0
    assert "of 2 of torchrun: expected --world launched" in printed
    assert "--world processes:2" in printed
    assert "shardproof/harness" not in printed, "no traceback of ours"
    assert not out.exists()


@pytest.mark.slow
def test_torchrun_ends_with_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = _torchrun(tmp_path, "pytest", "suites/smoke", "--engine", "torch.ddp", "--out", str(out))
    printed, _ = done.communicate(timeout=110)
    _assert_ends_with_a_sentence(done.returncode, printed, out)


@pytest.mark.slow
@pytest.mark.parametrize("called", ["another_world", "own_suite"])
def test_a_process_of_torchrun_ends_with_a_sentence(tmp_path: Path, called: str) -> None:
    """The test sets torchrun's environment, because torchrun itself would start three processes that import torch."""
    out, own = tmp_path / "run", tmp_path / "test_own.py"
    own.write_text("def test_it(trial):\n    raise AssertionError\n")
    commands = {
        "another_world": ("shardproof", "run", "--suite", "smoke", "--world", "threads:2"),
        "own_suite": ("pytest", "-p", "shardproof.harness.runner.plugin", str(own)),
    }
    done = python(
        *("-m", *commands[called], "--engine", "torch.ddp", "--out", str(out)),
        TORCHELASTIC_RUN_ID="none",
        RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="localhost",
    )
    _assert_ends_with_a_sentence(done.returncode, done.stdout + done.stderr, out)
