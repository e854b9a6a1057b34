"""What must be true after a fault: no false pass, no orphan, nothing left over, no lost record, no late explanation."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
from collections.abc import Sequence
from typing import Any

from campaigns.fault_kinds import Fault, Kind, Miss
from campaigns.live_run import LateError, LiveRun
from shardproof.harness.cli.exit_codes import (
    CONFORMS,
    DOES_NOT_CONFORM,
    INTERRUPTED,
    NOTHING_JUDGED,
    OUR_FAULT,
    USAGE,
)
from shardproof.harness.cli.main import main
from shardproof.harness.records.run import RECORDS, RUN

Misses = list[tuple[Miss, str]]

_CODES = {CONFORMS, DOES_NOT_CONFORM, USAGE, OUR_FAULT, NOTHING_JUDGED}
_QUOTED = 3000  # characters; the start of a traceback is worth more than its end
_END_LIMIT_S = 90.0
# The reaper ends its descendants within a fraction of this.
_ORPHANS_LIMIT_S = 10.0
_PROGRESS = re.compile(r"^([.FEsxX]+)(?: +\[ *\d+%\])?$")


def call(*arguments: str) -> tuple[int, str]:
    """Call a command in this process; returns its exit code and output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments)
    return code, said.getvalue()


def complaint(*arguments: str) -> str:
    """Call a command that must end with one of our exit codes; returns a complaint, empty if there is none."""
    try:
        code, said = call(*arguments)
    except Exception as error:
        return f"{arguments[0]} raised {type(error).__name__}: {error}"
    if code not in _CODES:
        return f"{arguments[0]} ended with {code}: {said[-_QUOTED:]}"
    return ""


def records_of(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Read lines of records; Any: JSON."""
    return [json.loads(line) for line in lines]


def check_worlds(faults: Sequence[Fault], lines: Sequence[str]) -> None:
    """Check the verdicts of every fault's cases; one that passed is a false pass."""
    for fault in faults:
        found = [
            r
            for r in records_of(lines)
            if any(r["observation"] and w.endswith(r["observation"]) for w in fault.worlds)
        ]
        fault.verdicts += tuple(record["verdict"] for record in found)
        fault.headlines += tuple(record["headline"].split("\n")[0] for record in found)
        for record in found:
            if record["verdict"] == "PASSED" and fault.is_done:
                fault.misses.append((Miss.FALSE_GREEN, f"{record['case']} in {record['world']} passed"))


def check_end(run: LiveRun, faults: Sequence[Fault], ending: Kind | None, seen: Sequence[str]) -> Misses:
    """Wait for the run to end, and check its files and processes; ``seen`` are the earlier records."""
    try:
        code = run.ended(_END_LIMIT_S)
    except LateError as error:
        return [(Miss.LATE, str(error))]
    misses = [
        (Miss.ORPHAN, f"{found.role} {found.pid} {found.world}") for found in run.orphans(_ORPHANS_LIMIT_S)
    ]
    misses += [(Miss.LITTER, name) for name in run.litter()]
    lines = run.records()
    if list(seen) != lines[: len(seen)]:
        misses.append((Miss.LOST, f"{len(seen)} records were there, now {len(lines)}"))
    misses += _check_progress(run, lines)
    misses += _check_code(run, code, ending, lines, is_struck=any(f.is_done and f.worlds for f in faults))
    if lines and (wrong := _report(run)):
        misses.append((Miss.UNREADABLE, wrong))
    return misses


def _check_progress(run: LiveRun, lines: Sequence[str]) -> Misses:
    """Compare the marks of passed cases on the terminal with the records."""
    marks = "".join(match[1] for line in run.said().splitlines() if (match := _PROGRESS.match(line)))
    passed = sum(record["verdict"] == "PASSED" for record in records_of(lines))
    if marks.count(".") > passed:
        return [(Miss.LOST, f"the terminal shows {marks.count('.')} passed, the run has {passed}")]
    return []


def _check_code(
    run: LiveRun, code: int, ending: Kind | None, lines: Sequence[str], *, is_struck: bool
) -> Misses:
    if ending is not None:
        return _check_interruption(run, code, ending)
    verdicts = {record["verdict"] for record in records_of(lines)}
    is_whole = (run.out / "SHA256SUMS").exists() and len(lines) == _announced(run)
    if code == 0 and (is_struck or not is_whole or not verdicts <= {"PASSED", "UNSUPPORTED"}):
        return [(Miss.FALSE_GREEN, f"exit code 0 with {sorted(verdicts)}, {len(lines)} records")]
    if code not in _CODES:
        return [(Miss.UNREADABLE, f"exit code {code}: {run.said()[-_QUOTED:]}")]
    if not is_whole and code == 1:
        return [
            (
                Miss.LOST,
                f"{len(lines)} records of {_announced(run)}, exit code {code}: {run.said()[-_QUOTED:]}",
            )
        ]
    return []


def _check_interruption(run: LiveRun, code: int, ending: Kind) -> Misses:
    """Check the exit code of an interrupted run; before its handler is installed, Python's own codes apply."""
    allowed = {-ending.number}
    if ending.number is signal.SIGINT:
        # 2, if an engine could not be judged before: its server was stopped.
        is_early = ending.is_twice or not (run.out / RUN).exists()
        allowed = {-ending.number, 1, INTERRUPTED} if is_early else {2, INTERRUPTED}
    misses: Misses = []
    if code not in allowed:
        misses.append(
            (Miss.UNREADABLE, f"exit code {code}, expected {sorted(allowed)}: {run.said()[-_QUOTED:]}")
        )
    is_ordered = ending.number is signal.SIGINT and not ending.is_twice
    if is_ordered and (run.out / RUN).exists() and not (run.out / "report.html").exists():
        misses.append((Miss.LOST, f"no report: {run.said()[-_QUOTED:]}"))
    return misses


def _announced(run: LiveRun) -> int:
    """Read how many cases the run has selected; -1 if its header is not on the disk."""
    try:
        return int(json.loads((run.out / RUN).read_text().split("\n")[0])["num_cases"])
    except (OSError, ValueError):
        return -1


def _report(run: LiveRun) -> str:
    """Read the run as a user would, in a copy of its two files."""
    copy = run.out.with_name("copy")
    copy.mkdir()
    for name in (RECORDS, RUN):
        shutil.copy(run.out / name, copy)
    return complaint("report", str(copy))
