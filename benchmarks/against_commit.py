"""The same cases on this tree and on an older commit, by turns: ratios of processor time and of time passed.

Run: ``python -m benchmarks.against_commit COMMIT [--engine torch.fsdp2] [--world threads:4] [--suite parity]``
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.case_cost import measured
from shardproof.harness.worlds.processes.lineage import adopt_orphans

_ROOT = Path(__file__).resolve().parents[1]
_PLUGIN = "only_shared_cases"
_KEEPS_SHARED = """
from pathlib import Path

SHARED = set(Path(__file__).with_suffix(".txt").read_text().splitlines())

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.nodeid in SHARED]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one run: processor seconds, and wall-clock seconds."""

    cpu_s: float
    wall_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--engine", default="torch.fsdp2")
    parser.add_argument("--world", default="threads:4")
    parser.add_argument("--suite", action="append")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    adopt_orphans()  # so that the CPU seconds of fork servers are those of children
    suites = [f"suites/{suite}" for suite in arguments.suite or ("parity",)]
    options = [*suites, f"--engine={arguments.engine}", f"--world={arguments.world}", "--no-expectations"]
    with tempfile.TemporaryDirectory() as folder, _checked_out(arguments.commit, Path(folder, "tree")) as old:
        trees = {"then": old, "now": _ROOT}
        shared = set.intersection(*(_collected(tree, options) for tree in trees.values()))
        if not shared:
            sys.exit(f"expected cases that both trees have, got none in {', '.join(suites)}")
        Path(folder, f"{_PLUGIN}.py").write_text(_KEEPS_SHARED)
        Path(folder, f"{_PLUGIN}.txt").write_text("\n".join(shared))
        costs: dict[str, list[Cost]] = {"then": [], "now": []}
        for number in range(arguments.rounds):
            for name in sorted(trees, reverse=number % 2 == 0):  # the other one first in every other round
                costs[name].append(_run(trees[name], options, Path(folder)))
    print(f"{len(shared)} cases of {arguments.engine} in {arguments.world}, {arguments.rounds} rounds")
    print(tabulate(_rows(costs), headers=["", "then", "now", "now / then"], floatfmt=".2f"))


def _rows(costs: dict[str, list[Cost]]) -> Iterator[tuple[str, float, float, float]]:
    """Return the medians over rounds; ratios are of the two runs of one round."""
    for words, field in (("processor time [s]", "cpu_s"), ("time passed [s]", "wall_s")):
        then, now = ([getattr(cost, field) for cost in costs[name]] for name in ("then", "now"))
        ratios = [b / a for a, b in zip(then, now, strict=True)]
        yield words, median(then), median(now), median(ratios)


@contextlib.contextmanager
def _checked_out(commit: str, folder: Path) -> Iterator[Path]:
    git = ("git", "-C", str(_ROOT), "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def _pytest(tree: Path, *arguments: str, plugins: Sequence[Path] = ()) -> tuple[str, float]:
    """Run pytest on a tree's own code; returns its output and CPU seconds. Failing cases are not an error."""
    path = os.pathsep.join(map(str, (tree, *plugins)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done, seconds = measured(command, cwd=tree, env={**os.environ, "PYTHONPATH": path})
    if done.returncode not in (0, 1):
        sys.exit(done.stdout + done.stderr)
    return done.stdout, seconds


def _collected(tree: Path, options: Sequence[str]) -> set[str]:
    printed, _ = _pytest(tree, "--collect-only", *options)
    return {line for line in printed.splitlines() if "::" in line}


def _run(tree: Path, options: Sequence[str], plugins: Path) -> Cost:
    started = time.monotonic()
    _, seconds = _pytest(tree, "-p", _PLUGIN, *options, plugins=[plugins])
    return Cost(cpu_s=seconds, wall_s=time.monotonic() - started)


if __name__ == "__main__":
    main()
