"""The suites kill every mutant and spare every honest engine: run as a user runs them, in both kinds of world."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from engine.mutants import MUTANTS, Mutant, Trace
from engine.registry import BUILT_IN
from harness.record import Record
from harness.run_directory import read_run
from harness.verdict import Verdict

ROOT = Path(__file__).resolve().parents[1]
WORLDS = ["threads:2", "processes:2"]

# One case of each kind that some mutant needs; the whole of the suites would say the same at ten times the cost.
CASES = " or ".join(
    [
        "(multi_group and mlp_uneven-sgd-m3)",
        "(parity and accumulation and mlp_uneven-sgd-m3)",
        "(other_replicas and m3)",
        "(divides_as_asked and (singles-one-float32 or singles-two-float32))",
        "two_replicas_are_silent",
        "(communication and accumulation and m3)",
        "(gathers_each_group_twice and mlp_even)",
        "(layouts and shard-m3)",
    ]
)
ORACLE = "oracle"


@cache  # one run for all tests of this file
def _records() -> tuple[Record, ...]:
    out = Path(mkdtemp(prefix="shardproof-mutants-")) / "run"
    engines = [*sorted(BUILT_IN), *(m.engine_spec for m in MUTANTS)]
    # Some six hundred worlds: two at a time, as the tests themselves are run.
    command = [sys.executable, "-m", "pytest", "suites", "-q", "-n2", "-k", CASES, f"--out={out}"]
    cells = [*(f"--engine={engine}" for engine in engines), *(f"--world={world}" for world in WORLDS)]
    finished = subprocess.run(
        [*command, *cells],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 1, finished.stdout[-3000:] + finished.stderr[-3000:]
    run = read_run(out)
    assert not run.problems
    return run.records


def _of(engine: str, world: str) -> list[Record]:
    return [r for r in _records() if r.engine == engine and r.world == world]


@pytest.mark.timeout(920)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("engine", sorted(BUILT_IN))
def test_honest_engines_pass(engine: str, world: str) -> None:
    records = _of(engine, world)
    assert {r.verdict for r in records} <= {Verdict.PASSED, Verdict.UNSUPPORTED}, _told(records)
    assert sum(r.verdict is Verdict.PASSED for r in records) >= 3


@pytest.mark.timeout(920)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutants_die_of_their_sin(mutant: Mutant, world: str) -> None:
    records = _of(mutant.engine_spec, world)
    # A mutant that merely crashes has been caught by accident, and says nothing of the laws.
    assert {r.verdict for r in records} <= {
        Verdict.PASSED,
        Verdict.FAILED,
        Verdict.UNSUPPORTED,
        Verdict.UNSUPPORTED_SILENT,
    }, _told(records)
    assert _kills(mutant, records), f"{mutant.name} survived: {_told(records)}"


def _kills(mutant: Mutant, records: list[Record]) -> list[Record]:
    failed = [r for r in records if r.verdict is Verdict.FAILED]
    broken = {law.law for r in failed for law in r.laws if not law.held}
    match mutant.trace:
        case Trace.NUMBERS:
            return [r for r in failed if any(ORACLE in law.law and not law.held for law in r.laws)]
        case Trace.COMMUNICATION:
            assert not any(ORACLE in law for law in broken), "its numbers are right, so parity must hold"
            return failed
        case Trace.REFUSAL:
            return [r for r in records if r.verdict is Verdict.UNSUPPORTED_SILENT]


def _told(records: list[Record]) -> str:
    return "\n".join(f"{r.verdict} {r.case}: {r.headline}" for r in records)


def test_there_are_enough_mutants_and_each_names_its_model() -> None:
    assert len(MUTANTS) >= 14
    assert len({m.engine_spec for m in MUTANTS}) == len(MUTANTS)
    assert all("#" in m.thread and "/" in m.thread for m in MUTANTS)
