"""Known failures in runs of a user: runs that pass, runs that fail, and the same verdicts when judged again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof.harness.cases import case_id
from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import JUDGED, Run, read_run
from shardproof.harness.runner.invoke import call_pytest
from shardproof.reports.summary import Conclusion, conclude, tally

SUMS = "shardproof.engine.mutants.gradient_scale:SumsInsteadOfAveraging"
DDP = "torch.ddp"
SMOKE = "smoke/test_smoke.py::test_trains_the_same_model"
Judged = Callable[..., tuple[int, Run]]


def _entry(engine: str, case: str = SMOKE, expiry: str = "9999-12-31") -> str:
    return f"""
[[expectation]]
engine = "{engine}"
case = "{case}"
shows = "matches the oracle"
reason = "Sums gradients."
link = "https://github.com/NVIDIA/Megatron-LM/issues/3023"
expiry = {expiry}
"""


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Run the only case with these expectations; return the exit code of pytest, and the run."""
    monkeypatch.setattr(case_id, "files", lambda: {"smoke/test_smoke.py"})
    file, out = tmp_path / "known.toml", tmp_path / "run"

    def run(text: str, *arguments: str) -> tuple[int, Run]:
        file.write_text(text)
        options = ["--world=threads:2", f"--expectations={file}", f"--out={out}"]
        return call_pytest(["suites/smoke/test_smoke.py", *options, *arguments]), read_run(out)

    return run


def _untimed(records: tuple[Record, ...]) -> list[Record]:
    return [replace(record, duration_s=0.0, observation="") for record in records]


@pytest.mark.slow
def test_a_known_failure_passes_the_run_and_so_it_is_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "known.toml", tmp_path / "run"
    file.write_text(_entry(SUMS) + _entry(SUMS, case="parity/test_gone*"))
    options = [
        "--world=threads:2",
        "--suite=smoke",
        "-k=trains_the_same_model",
        f"--expectations={file}",
        f"--out={out}",
    ]
    assert main(["run", f"--engine={SUMS}", *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"KNOWN_FAILURE +1 ", printed), printed
    report = (out / "report.md").read_text()
    assert "Expectations not exercised:" in report, "a selection proves nothing about other cases"

    first = read_run(out)
    (record,) = first.records
    assert record.verdict is Verdict.KNOWN_FAILURE
    assert any(not law.held for law in record.laws), "the evidence stays"
    assert tally(first.records).passed == 0

    file.unlink()
    assert main(["judge", str(out)]) == 0
    second = read_run(out / JUDGED)
    assert _untimed(second.records) == _untimed(first.records)
    assert (second.header, second.footer) == (first.header, first.footer)


@pytest.mark.slow
def test_an_unexpected_pass_and_an_expired_expectation_fail_the_run(judged: Judged) -> None:
    text = _entry(DDP) + _entry(SUMS, expiry="2001-01-01") + _entry(SUMS, case="smoke/test_gone*")
    code, run = judged(text, f"--engine={DDP}", f"--engine={SUMS}")
    assert code == 1
    assert {r.engine: r.verdict for r in run.records} == {
        DDP: Verdict.UNEXPECTED_PASS,
        SUMS: Verdict.FAILED,
    }
    failed = next(r for r in run.records if r.engine == SUMS)
    assert failed.headline.startswith("expectation expired on 2001-01-01")
    assert run.footer is not None
    assert [found.is_stale for found in run.footer.unused] == [False, True], "expired, and stale"
    assert conclude(run) is Conclusion.NOT_CONFORMING


@pytest.mark.slow
def test_a_stale_expectation_alone_fails_a_run_of_the_whole_catalogue(judged: Judged) -> None:
    code, run = judged(
        _entry(DDP, case="smoke/test_gone*"), f"--engine={DDP}", "-n1", "-p", "tests.verdicts.smoke_is_all"
    )
    assert [r.verdict for r in run.records] == [Verdict.PASSED]
    assert run.footer is not None
    assert [found.is_stale for found in run.footer.unused] == [True]
    assert code == 1
    assert conclude(run) is Conclusion.NOT_CONFORMING


@pytest.mark.slow
def test_an_unused_expectation_fails_no_selection(judged: Judged) -> None:
    selection = [f"--engine={DDP}", f"--engine={SUMS}", "-k", DDP]
    code, run = judged(_entry(DDP, case="smoke/test_gone*"), *selection)
    assert run.footer is not None
    assert [found.is_stale for found in run.footer.unused] == [False]
    assert code == 0
    assert conclude(run) is Conclusion.CONFORMING


@pytest.mark.slow
def test_without_expectations_verdicts_are_raw(tmp_path: Path) -> None:
    options = ["--world=threads:2", "--suite=smoke", "-k=trains_the_same_model", "--no-expectations"]
    options += [f"--out={tmp_path / 'run'}"]
    assert main(["run", f"--engine={SUMS}", *options]) == 1
    run = read_run(tmp_path / "run")
    assert [r.verdict for r in run.records] == [Verdict.FAILED]
    assert run.header.expectations is None


def test_a_bad_file_ends_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "known.toml", tmp_path / "run"
    file.write_text(_entry("torch.dpd"))
    assert main(["run", f"--expectations={file}", f"--out={out}"]) == 2
    assert "expectation 1: engine" in capsys.readouterr().err
    assert main(["run", f"--expectations={tmp_path / 'nowhere.toml'}", f"--out={out}"]) == 2
    assert "none there" in capsys.readouterr().err
    assert not out.exists()


def test_a_file_and_no_expectations_are_refused_together() -> None:
    with pytest.raises(SystemExit):
        main(["run", "--expectations=known.toml", "--no-expectations"])
