"""Where the time of a case goes: the CPU seconds of each stage of judging, of all processes, as shares of one run.

Run: ``python -m benchmarks.case_cost [--engine torch.fsdp2] [--world threads:4] [--suite parity] [--markdown]``
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.case_stages import FILE, IMPORTS, SESSION
from shardproof.harness.worlds.processes.lineage import adopt_orphans

_SUITES = ("smoke", "parity", "state", "lifetimes", "races")
_STAGES = {
    IMPORTS: "imports of session and fork servers",
    "identity": "digests of content",
    "worlds": "starting and ending ranks",
    "training": "training by the engine, watched",
    "oracle": "oracle, exact",
    "noise runs": "oracle, noise runs",
    "keeping": "keeping observations",
    "loading": "loading observations",
    "judging": "judging",
    "record": "records",
    "pytest": "pytest, and the rest of the session",
    "forks": "forks, their ends, pages copied",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="torch.fsdp2")
    parser.add_argument("--world", action="append")
    parser.add_argument("--suite", action="append")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    adopt_orphans()  # so that the CPU seconds of fork servers are those of children
    columns, heads = [], []
    for world in arguments.world or ("threads:4", "processes:2"):
        for suite in arguments.suite or _SUITES:
            columns.append(_shares(arguments.engine, world, suite))
            heads.append(f"{suite}, {world}")
    rows = [[words, *(f"{c[stage]:.0%}" for c in columns)] for stage, words in _STAGES.items()]
    form = "github" if arguments.markdown else "simple"
    print(tabulate(rows, headers=["stage", *heads], tablefmt=form, disable_numparse=True))


def _shares(engine: str, world: str, suite: str) -> dict[str, float]:
    """Run one suite; returns each stage's share of all its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        stages, out = Path(folder) / "stages", Path(folder) / "run"
        where = [f"suites/{suite}", f"--engine={engine}", f"--world={world}", f"--out={out}"]
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.case_stages", "-q", *where]
        run, total = measured(command, env={**os.environ, FILE: str(stages)})
        if run.returncode not in (0, 1):
            sys.exit(run.stdout + run.stderr)
        taken = _by_stage(stages)
    taken["forks"] = total - sum(taken.values())
    return {stage: taken[stage] / total for stage in _STAGES}


def measured(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a session to its end; returns it and its CPU seconds, including those of orphans that this process adopts."""
    before = _seconds_of_children()
    run = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    while True:  # the session's fork servers end after it
        with contextlib.suppress(ChildProcessError):
            os.wait()
            continue
        return run, _seconds_of_children() - before


def _by_stage(file: Path) -> dict[str, float]:
    """Add up the seconds of each stage; the session's time outside its stages is pytest's."""
    taken: dict[str, float] = defaultdict(float)
    of_process: dict[str, float] = defaultdict(float)
    for line in file.read_text().splitlines():
        process, seconds, stage = line.split(" ", 2)
        if stage == SESSION:
            taken["pytest"] = float(seconds) - of_process[process]
        else:
            taken[stage] += float(seconds)
            of_process[process] += float(seconds)
    return taken


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
