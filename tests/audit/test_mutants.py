"""Every mutant dies of a case that names it, and honest engines pass, in runs of the command line."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from shardproof.engine.registry import BUILT_IN
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import read_run
from tests.shell import ROOT

WORLDS = ["threads:2", "processes:2"]

# One case of each kind, by suite and file; `shardproof run` judges the whole suites, which takes minutes for each
# engine.
CASES = {
    "parity/test_multi_group.py": "mlp_uneven-sgd-m3",
    "parity/test_accumulation.py": "mlp_uneven-sgd-m4",
    "parity/test_layouts.py": "trains_the_same_model and shard",
    "shared_parameters/test_tied.py": "tied_within_the_root",
    "unused/test_unused.py": "reduces_what_only_some_ranks_used",
    "state/test_resume.py": "resumes_as_it_was and sgd",
    "recovery/test_exceptions.py": "a_forward_that_raised",
    "communication/test_replicated.py": "reduces_each_gradient_once and mlp_even",
    "communication/test_sharded.py": "gathers_each_group_once_when_kept and mlp_even",
}
# Every mutant on one case: some three hundred worlds, two at a time.
LIMIT_S = 1500  # a limit for a hang: on two free cores the run takes a third of it


def _call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@cache  # one run for all tests of this file
def _records() -> tuple[Record, ...]:
    out = Path(mkdtemp(prefix="shardproof-honest-")) / "run"
    cells = [
        *(f"--engine={engine}" for engine in sorted(BUILT_IN)),
        *(f"--world={world}" for world in WORLDS),
    ]
    chosen = " or ".join(f"({Path(file).stem} and {words})" for file, words in CASES.items())
    options = ["-q", "-k", chosen, f"--out={out}", "--no-expectations"]
    finished = _call("pytest", *(f"suites/{file}" for file in CASES), *options, *cells)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    run = read_run(out)
    assert not run.problems
    return run.records


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("engine", sorted(BUILT_IN))
def test_honest_engines_pass(engine: str, world: str) -> None:
    records = [r for r in _records() if r.engine == engine and r.world == world]
    verdicts = "\n".join(f"{r.verdict} {r.case}: {r.headline}" for r in records)
    assert {r.verdict for r in records} <= {Verdict.PASSED, Verdict.UNSUPPORTED}, verdicts
    assert sum(r.verdict is Verdict.PASSED for r in records) >= 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_every_mutant_dies_of_a_case_that_names_it(tmp_path: Path) -> None:
    finished = _call(
        "shardproof.harness.cli.main", "mutants", "--quick", "-n", "2", "--out", str(tmp_path / "mutants")
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    # Other releases lack features that some cases need; the release of the tests leaves no case out.
    assert "refused" not in finished.stdout.splitlines()[-1]
