"""A rank ends with its process: failures after a rank's result are judged too, and no process outlives a world."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardproof.harness.errors import HarnessBug
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.saved_result import SavedResult
from shardproof.harness.tracing.journal import read_journal
from shardproof.harness.verdicts.judgement import Judgement, judge_failure
from shardproof.harness.worlds.launch import World, launch
from shardproof.harness.worlds.outcome import Raised, Returned, TimedOut, WorldResult
from shardproof.harness.worlds.processes.forkserver import warm_up
from shardproof.harness.worlds.processes.lineage import has_ended
from shardproof.harness.worlds.rank import journal_path
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind, WorldSpec
from tests.shell import ROOT
from tests.worlds import ends
from tests.worlds.ends import Body

DEADLINE_S = 30.0
# The limit for all that waits for no deadline; far from the deadline, for busy machines.
SOON_S = 15.0
KINDS = list(OWN_KINDS)
PROCESSES = WorldKind.PROCESSES
THREADS = WorldKind.THREADS


pytestmark = pytest.mark.usefixtures("warm")


def _run(body: Body, kind: WorldKind, folder: Path, *, deadline_s: float = DEADLINE_S) -> WorldResult:
    started = time.monotonic()
    result = launch(WorldSpec(kind=kind, size=2, deadline_s=deadline_s), body, folder=folder)
    assert time.monotonic() - started < SOON_S
    return result


def _judged(result: WorldResult, folder: Path) -> Judgement:
    assert not result.is_clean
    ledgers = tuple(read_journal(journal_path(folder, o.rank)).ledger for o in result.outcomes)
    return judge_failure(SavedResult(result=result, refusals={}, ledgers=ledgers, ranks=()))


def _child(folder: Path) -> int:
    return int((folder / "child").read_text())


CRASHES: list[tuple[Body, WorldKind, str]] = [
    (ends.aborts_when_groups_are_destroyed, PROCESSES, "rank 1 was killed by SIGABRT after its result"),
    (ends.aborts_at_exit, PROCESSES, "rank 1 was killed by SIGABRT after its result"),
    (ends.is_killed_at_exit, PROCESSES, "rank 1 was killed by SIGKILL after its result"),
    (ends.is_terminated_at_exit, PROCESSES, "rank 1 was killed by SIGTERM after its result"),
    (ends.segfaults_at_exit, PROCESSES, "rank 1 was killed by SIGSEGV after its result"),
    (ends.exits_with_a_status, PROCESSES, "rank 1 exited with status 3 after its result"),
    (ends.exits_too_early, PROCESSES, "rank 1 exited with status 0 after its result"),
    (ends.raises_when_groups_are_destroyed, PROCESSES, "rank 1 raised RuntimeError: a group is still in use"),
    (ends.closes_its_connections, PROCESSES, "rank 1 exited with status 1"),
    (ends.dies_after_its_result, PROCESSES, "rank 1 was killed by SIGKILL after its result"),
    (ends.aborts_at_exit, THREADS, "the process of all ranks was killed by SIGABRT after their results"),
    (ends.is_killed_at_exit, THREADS, "the process of all ranks was killed by SIGKILL after their results"),
    (ends.exits_too_early, THREADS, "the process of all ranks exited with status 0 after their results"),
]


@pytest.mark.parametrize(
    ("body", "kind", "headline"), CRASHES, ids=[f"{body.__name__}-{kind}" for body, kind, _ in CRASHES]
)
def test_a_crash_after_the_result_fails_the_case(
    body: Body, kind: WorldKind, headline: str, tmp_path: Path
) -> None:
    judgement = _judged(_run(body, kind, tmp_path), tmp_path)
    assert judgement.verdict is Verdict.CRASHED
    assert headline in judgement.headline


HANGS: list[tuple[Body, WorldKind, str]] = [
    (ends.hangs_when_groups_are_destroyed, PROCESSES, "in wait"),
    (ends.hangs_at_exit, PROCESSES, "in wait"),
    (ends.leaves_a_thread, PROCESSES, "thread 'uploader', which is not a daemon, still runs"),
    (ends.leaves_a_thread, THREADS, "thread 'uploader', which is not a daemon, still runs"),
]


@pytest.mark.parametrize(
    ("body", "kind", "headline"), HANGS, ids=[f"{body.__name__}-{kind}" for body, kind, _ in HANGS]
)
def test_a_rank_that_does_not_end_after_its_result_hangs(
    body: Body, kind: WorldKind, headline: str, tmp_path: Path
) -> None:
    judgement = _judged(_run(body, kind, tmp_path, deadline_s=1.0), tmp_path)
    assert judgement.verdict is Verdict.HUNG
    assert "rank 1 returned its result and did not end" in judgement.headline
    assert headline in judgement.headline


LEAVERS = [ends.leaves_a_child, ends.leaves_a_detached_child, ends.forks_a_daemon, ends.forks_twice]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", LEAVERS)
def test_a_child_that_is_left_fails_the_case_and_is_ended(
    body: Body, kind: WorldKind, tmp_path: Path
) -> None:
    result = _run(body, kind, tmp_path)
    assert all(isinstance(o, Returned) for o in result.outcomes)
    judgement = _judged(result, tmp_path)
    assert judgement.verdict is Verdict.FAILED
    ranks = "rank 1" if kind is PROCESSES else "ranks 0, 1"
    assert f"{ranks} left processes behind" in judgement.headline
    assert has_ended(_child(tmp_path))


def test_a_child_that_is_left_is_named(tmp_path: Path) -> None:
    result = _run(ends.leaves_a_detached_child, PROCESSES, tmp_path)
    assert result.leaks == ("rank 1 left processes behind: 'sleep 600' in a session of its own",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [ends.dies_beside_a_daemon, ends.dies_beside_an_orphaned_daemon])
def test_a_death_is_seen_at_once_though_a_child_holds_the_pipe(
    body: Body, kind: WorldKind, tmp_path: Path
) -> None:
    judgement = _judged(_run(body, kind, tmp_path), tmp_path)
    assert judgement.verdict is Verdict.CRASHED
    assert "rank 1 was killed by SIGKILL" in judgement.headline
    assert "left processes behind" in judgement.headline
    assert has_ended(_child(tmp_path))


CLEAN = [
    ends.leaves_an_idle_executor,
    ends.leaves_a_thread_that_ends,
    ends.leaves_a_daemon_thread,
    ends.leaves_a_daemonic_worker,
    ends.waits_for_its_children,
    ends.leaves_a_child_that_follows,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", CLEAN)
def test_leftovers_that_end_with_a_script_are_clean(body: Body, kind: WorldKind, tmp_path: Path) -> None:
    result = _run(body, kind, tmp_path)
    assert result.is_clean, result


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_message_holds_up_no_verdict(kind: WorldKind, tmp_path: Path) -> None:
    result = _run(ends.sends_half_a_message, kind, tmp_path, deadline_s=1.0)
    assert all(isinstance(o, TimedOut) for o in result.outcomes)


def test_a_large_result_arrives(tmp_path: Path) -> None:
    result = _run(ends.returns_a_megabyte, PROCESSES, tmp_path)
    assert [o.value for o in result.outcomes if isinstance(o, Returned)] == [
        ["0" * 2**10] * 2**10,
        ["1" * 2**10] * 2**10,
    ]


def test_the_deadline_covers_the_start_of_a_host(tmp_path: Path) -> None:
    # The host opens it first, and waits for ever for a reader.
    os.mkfifo(tmp_path / "host0.stacks")
    started = time.monotonic()
    with pytest.raises(HarnessBug, match="nothing within the deadline of 1 s"):
        World(WorldSpec(kind=THREADS, size=1, deadline_s=1.0), tmp_path)
    assert time.monotonic() - started < SOON_S


def test_a_rank_that_kills_the_fork_server_fails_the_case_and_no_other(tmp_path: Path) -> None:
    judgement = _judged(_run(ends.kills_the_fork_server, PROCESSES, tmp_path / "1"), tmp_path)
    assert judgement.verdict is Verdict.CRASHED
    assert "the fork server was killed" in judgement.headline
    warm_up()  # the next server
    assert _run(ends.leaves_a_daemon_thread, PROCESSES, tmp_path / "2").is_clean


# A session that ends while two ranks and their leftovers run, one leftover in a session of its own.
_SESSION = """
import sys
from pathlib import Path
from shardproof.harness.worlds.processes.forkserver import warm_up
from shardproof.harness.worlds.processes.lineage import has_ended
from shardproof.harness.worlds.launch import World, launch
from shardproof.harness.worlds.spec import WorldKind, WorldSpec
from tests.worlds import ends
launch(WorldSpec(kind=WorldKind.PROCESSES, size=2), ends.waits_beside_a_daemon, folder=Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_session_that_is_killed(
    number: signal.Signals, tmp_path: Path, short_folder: Path
) -> None:
    temporary = short_folder
    os.mkfifo(tmp_path / "child")  # opened by the rank once its child runs
    session = subprocess.Popen(
        [sys.executable, "-c", _SESSION, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
    )
    child = int((tmp_path / "child").read_text())
    assert list(temporary.glob("pymp-*"))
    session.send_signal(number)
    session.communicate()  # the reaper, the server and the ranks hold its standard error: all have ended
    assert has_ended(child)
    assert list(temporary.glob("pymp-*")) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [ends.fills_the_disk_with_calls, ends.fills_the_disk_with_its_last_marks])
def test_a_ledger_that_cannot_be_written_is_an_error_of_its_rank(
    body: Body, kind: WorldKind, tmp_path: Path
) -> None:
    result = _run(body, kind, tmp_path)
    assert any(isinstance(o, Raised) and o.kind == "OSError" for o in result.outcomes), result
    assert _judged(result, tmp_path).verdict is Verdict.CRASHED
