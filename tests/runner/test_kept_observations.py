"""A run keeps only observations of failures unless asked; judging again lists cases that it cannot judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import JUDGED, read_run
from shardproof.harness.runner.invoke import call_pytest
from tests.sample_records import TRAINS, records_by_engine

SUMS = "shardproof.engine.mutants.gradient_scale:SumsInsteadOfAveraging"


def _run(out: Path, *more: str) -> dict[str, Record]:
    engines = ["--engine", "torch.ddp", "--engine", SUMS, "--no-expectations"]
    assert main(["run", *engines, "--suite", "smoke", "--out", str(out), *more]) == 1
    return records_by_engine(read_run(out).records, TRAINS)


def _observed(out: Path) -> set[str]:
    return {path.parents[1].parent.name for path in out.rglob("rank0.ledger.jsonl")}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("usual") / "run"
    found = _run(out)
    assert (found["torch.ddp"].verdict, found[SUMS].verdict) == (Verdict.PASSED, Verdict.FAILED)
    return out


def test_only_failures_keep_observations(usual: Path) -> None:
    for record in read_run(usual).records:
        assert bool(record.observation) is (record.verdict not in {Verdict.PASSED, Verdict.UNSUPPORTED})
        assert not record.observation or (usual / record.observation / "rank1.observation").is_file()
    assert not list((usual / "observations" / "main").glob("torch.ddp*"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one_process", "workers"])
def test_all_is_kept_on_demand(tmp_path: Path, workers: tuple[str, ...]) -> None:
    for record in _run(tmp_path / "run", "--keep", "all", *workers).values():
        assert (tmp_path / "run" / record.observation / "rank0.observation").is_file()
    assert main(["judge", str(tmp_path / "run")]) == 1
    assert read_run(tmp_path / "run" / JUDGED).problems == ()


@pytest.mark.slow
def test_a_worker_deletes_observations_of_passes(tmp_path: Path) -> None:
    found = _run(tmp_path / "run", "-n", "1")
    assert found["torch.ddp"].observation == ""
    assert (tmp_path / "run" / found[SUMS].observation / "rank0.observation").is_file()
    assert _observed(tmp_path / "run") == {path.name for path in (tmp_path / "run").rglob("*SumsInst*")}


def test_a_case_without_kept_observations_keeps_its_verdict_and_is_listed(
    usual: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", str(usual)]) == 1
    old, new = read_run(usual), read_run(usual / JUDGED)
    assert [r.verdict for r in new.records] == [r.verdict for r in old.records]
    quiet = [r for r in old.records if not r.observation]
    (problem,) = new.problems
    assert problem.startswith("not judged again: what passed or was refused is only kept by `run --keep all`")
    assert problem.endswith(f"and {len(quiet) - 1} more")
    assert problem in " ".join(capsys.readouterr().out.split())


def test_a_red_run_cannot_turn_green_by_judging_the_rest(usual: Path) -> None:
    assert Verdict.FAILED in {record.verdict for record in read_run(usual / JUDGED).records}


SHARED = """
from shardproof import RanksAgree, Trial, rule
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.training import train


class Never:
    name = "never"

    def judge(self, evidence):
        return rule(self.name, ["it does not hold"], held="")


def test_first(trial: Trial) -> None:
    trial.holds(train(MLP_EVEN, units=()), RanksAgree())


def test_second(trial: Trial) -> None:
    trial.holds(train(MLP_EVEN, units=()), Never())
"""


def test_observations_that_a_failure_shares_with_a_pass_are_kept(tmp_path: Path) -> None:
    """The pass came first, and its world is not run again."""
    (tmp_path / "test_shared.py").write_text(SHARED)
    options = ("--engine=torch.ddp", "--no-expectations", f"--out={tmp_path / 'run'}")
    assert call_pytest([str(tmp_path / "test_shared.py"), *options]) == pytest.ExitCode.TESTS_FAILED
    first, second = read_run(tmp_path / "run").records
    assert (first.verdict, second.verdict) == (Verdict.PASSED, Verdict.FAILED)
    assert (first.observation, bool(second.observation)) == ("", True)
    assert (tmp_path / "run" / second.observation / "rank0.observation").is_file()
