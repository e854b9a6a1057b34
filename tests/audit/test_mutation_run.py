"""Mutation testing from marks to an exit code; an honest engine among the mutants survives."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM, USAGE
from shardproof.harness.errors import UsageError
from shardproof.harness.runner.session_end import Refusals, refuse
from tests.shell import python

# The first test waits for the runs of all tests, which are slow on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(530)]


class Posing(DistributedDataParallelEngine):
    """An honest engine that poses as a mutant: no law detects it."""


SUITE = """
import pytest

from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.cases.training import Schedule, Training
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.runner.trial import Trial

pytestmark = pytest.mark.kills("{module}")
three = pytest.param(2, marks=pytest.mark.kills("KeepsOnlyTheLastMicrobatch", world="threads:3"))

def holds(trial, microbatches=1):
    schedule = Schedule(steps=2, microbatches=microbatches)
    trial.holds(Training(problem=MLP_EVEN, optimizer=SGD, schedule=schedule), MatchesOracle())

@pytest.mark.parametrize("microbatches", [1, three])
def test_kills(trial: Trial, microbatches):
    holds(trial, microbatches)

@pytest.mark.kills("Posing")
def test_detects_nothing(trial: Trial):
    holds(trial)
"""
UNMARKED = """
from shardproof.harness.runner.trial import Trial

def test_unmarked(trial: Trial):
    raise AssertionError("never run")
"""
# One process for all three, because importing torch takes longer than the runs.
HUNTS = """
import sys
from pathlib import Path
from shardproof.harness.audit.kill_matrix import Target
from shardproof.harness.audit.shipped_mutants import shipped
from shardproof.harness.cli.commands.mutants import run_mutants
from shardproof.harness.cli.main import main, parser

folder = Path(sys.argv[1])
engine = "tests.audit.test_mutation_run:Posing"
posing = Target(name="Posing", engine=engine, fault="none", trace="NUMBERS", verdicts=("FAILED",))
names = {"SumsInsteadOfAveraging", "KeepsOnlyTheLastMicrobatch"}
targets = (*(t for t in shipped() if t.name in names), posing)

def goes(suite, num_workers):
    out = folder / f"{suite}-out"
    options = ["--world", "threads:2", "--out", str(out), "--workers", str(num_workers)]
    return run_mutants(parser().parse_args(["mutants", *options]), targets, [folder / suite])

print("code of honest", goes("honest", 1))
print("code of misspelt", goes("misspelt", 0))
command = ["mutants", "--suite", "smoke", "-k", "SumsInsteadOfAveraging", "--out", str(folder / "smoke-out")]
print("code of smoke", main(command))
"""


def _suite(folder: Path, **files: str) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutationRuns:
    """Output and files of three runs."""

    folder: Path
    stderr: str
    stdout: dict[str, str]  # by suite
    codes: dict[str, int]


@cache  # one process for all tests below
def _run() -> MutationRuns:
    folder = Path(mkdtemp(prefix="shardproof-mutants-"))
    _suite(folder / "honest", marked=SUITE.format(module="SumsInsteadOfAveraging"), unmarked=UNMARKED)
    _suite(folder / "misspelt", marked=SUITE.format(module="SumsInstedOfAveraging"))
    done = python("-c", HUNTS, str(folder), limit_s=500)
    parts = re.findall(r"(.*?)^code of (\w+) (\d)$", done.stdout, re.M | re.S)
    assert len(parts) == 3, done.stdout + done.stderr
    return MutationRuns(
        folder=folder,
        stderr=done.stderr,
        stdout={suite: text for text, suite, _ in parts},
        codes={suite: int(code) for _, suite, code in parts},
    )


def test_a_run_takes_exactly_the_pairs_of_its_marks() -> None:
    run = _run()
    found = json.loads((run.folder / "honest-out" / "kills.json").read_text())["pairs"]
    assert sorted((p["case"].partition("::")[2], p["mutant"], p["world"], p["fate"]) for p in found) == [
        ("test_detects_nothing", "Posing", "threads:2", "survived"),
        ("test_detects_nothing", "SumsInsteadOfAveraging", "threads:2", "killed"),
        ("test_kills[1]", "SumsInsteadOfAveraging", "threads:2", "killed"),
        ("test_kills[2]", "KeepsOnlyTheLastMicrobatch", "threads:3", "killed"),
        ("test_kills[2]", "SumsInsteadOfAveraging", "threads:2", "killed"),
    ], run.stdout["honest"]


def test_an_honest_engine_that_poses_as_a_mutant_fails_the_run() -> None:
    run = _run()
    printed = run.stdout["honest"]
    assert run.codes["honest"] == DOES_NOT_CONFORM, printed
    assert "Posing in threads:2 on" in printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith(
        "2 of 3 mutants killed, 3 of 4 cases kill at least one, 1 pairs survived; 5 pairs in"
    )
    kept = (run.folder / "honest-out" / "kills.md").read_text()
    assert "Mutants that no case kills:\n\n- Posing: none" in kept


def test_a_case_without_a_kills_mark_is_named_and_never_run() -> None:
    assert "test_unmarked: no kills mark" in _run().stdout["honest"]


def test_a_misspelt_mutant_ends_the_run() -> None:
    run = _run()
    assert run.codes["misspelt"] == USAGE
    assert "got 'SumsInstedOfAveraging'; try 'SumsInsteadOfAveraging'" in run.stderr
    assert not (run.folder / "misspelt-out").exists()


def test_a_usage_error_of_a_worker_ends_the_session(request: pytest.FixtureRequest) -> None:
    """xdist passes the worker's output to a hook of the process that started it."""
    worker = SimpleNamespace(workeroutput={})
    items = [request.node]
    # A test cannot make a config; `refuse` needs only this field of a worker's.
    refuse(worker, items, UsageError("a mark", expected="A", got="B", hint="C"))  # type: ignore[arg-type]
    assert items == []
    with pytest.raises(pytest.UsageError, match="a mark: expected A, got B; try C"):
        Refusals().pytest_testnodedown(node=worker)


def test_the_command_kills_with_the_smoke_suite() -> None:
    run = _run()
    assert run.codes["smoke"] == CONFORMS, run.stdout["smoke"]
    last = run.stdout["smoke"].strip().splitlines()[-1]
    assert last.startswith("1 of 1 mutants killed, 1 of 1 cases kill at least one; 1 pairs in")
