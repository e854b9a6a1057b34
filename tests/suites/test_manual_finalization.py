"""The base engine of the finalization mutants is honest, on each release of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest

ENGINE = "shardproof.engine.adapters.manual_finalization:ManualFinalizationEngine"


@pytest.mark.slow
def test_it_passes_each_case_of_finalization(tmp_path: Path) -> None:
    cases = "suites/data_parallel/test_finalization.py"
    assert call_pytest([cases, f"--engine={ENGINE}", "--world=threads:2", f"--out={tmp_path}"]) == 0
    assert {record.verdict for record in read_run(tmp_path).records} == {Verdict.PASSED}
