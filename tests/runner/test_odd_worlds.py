"""In a world of an odd size, a case of every suite judges an honest engine right."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest

WORLD = "threads:7"
FINE = {Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.KNOWN_FAILURE}


class _Ids:
    """A plugin that keeps the collected cases."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.nodeid for item in session.items]


def _one_of_each_suite(engine: str, position: int) -> list[str]:
    plugin = _Ids()
    assert call_pytest(["suites", f"--engine={engine}", f"--world={WORLD}", "--collect-only"], plugin) == 0
    suites = [[*cases] for _, cases in groupby(plugin.ids, key=lambda case: case.split("/")[1])]
    assert len(suites) > 20
    return [cases[position] for cases in suites]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "position"), [("reference", -1), ("torch.fsdp1", 0)])
def test_honest_engines_conform(engine: str, position: int, tmp_path: Path) -> None:
    cases = _one_of_each_suite(engine, position)
    assert call_pytest([*cases, f"--engine={engine}", f"--world={WORLD}", f"--out={tmp_path}"]) == 0
    records = read_run(tmp_path).records
    assert len(records) == len(cases)
    assert {record.verdict for record in records} <= FINE
    assert sum(record.verdict is Verdict.PASSED for record in records) > 10
