"""In a world of a size that divides nothing, a case of every suite judges an honest engine right."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from tests.shell import python

WORLD = "threads:7"
FINE = {Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.KNOWN_FAILURE}


def _pytest(*arguments: str) -> str:
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, limit_s=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def _one_of_each_suite(engine: str, position: int) -> list[str]:
    """Return the ids of the cases at that position of their suites."""
    told = _pytest("suites", f"--engine={engine}", f"--world={WORLD}", "--collect-only")
    ids = re.findall(r"^(suites/\S+::.*)$", told, re.MULTILINE)
    suites = [[*cases] for _, cases in groupby(ids, key=lambda case: case.split("/")[1])]
    assert len(suites) > 20
    return [cases[position] for cases in suites]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "position"), [("reference", -1), ("torch.fsdp1", 0)])
def test_honest_engines_conform(engine: str, position: int, tmp_path: Path) -> None:
    cases = _one_of_each_suite(engine, position)
    _pytest(*cases, f"--engine={engine}", f"--world={WORLD}", f"--out={tmp_path}")
    records = read_run(tmp_path).records
    assert len(records) == len(cases)
    assert {record.verdict for record in records} <= FINE
    assert sum(record.verdict is Verdict.PASSED for record in records) > 10
