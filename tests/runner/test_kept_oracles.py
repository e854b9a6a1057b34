"""A run reuses the oracle of an earlier run if nothing changed, and no stale oracle fails an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof import LossScaling, MatchesOracle, Training, TrialSession, Verdict
from shardproof.fixtures.problems import MLP_EVEN, ModelProblem
from shardproof.harness.cli.main import main
from shardproof.harness.oracle import kept_oracle, oracle_answer
from shardproof.harness.records.record import Record
from shardproof.harness.records.run import JUDGED, read_run
from shardproof.harness.runner.invoke import call_pytest
from shardproof.harness.runner.observations import Source
from shardproof.harness.runner.oracles import arithmetic_of
from shardproof.harness.worlds.processes.fresh_process import ask
from shardproof.suites.training import train
from tests.judging import judged
from tests.sample_records import TRAINS, records_by_engine

BROKEN = "shardproof.engine.mutants.gradient_sync:NeverSynchronises"


class Farm:
    """Runs one case, each time in a session of its own, and counts the oracles that were computed."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.oracles = root / "oracles"
        self.num_computed = 0
        self._num_runs = 0

        # Any: as they came.
        def counted(*args: Any) -> bytes:
            self.num_computed += 1
            return ask(*args)

        monkeypatch.setattr(oracle_answer, "ask", counted)

    def run(self, problem: ModelProblem = MLP_EVEN, engine: str = "torch.ddp") -> Verdict:
        self._num_runs += 1
        session = TrialSession(Source(folder=self.root / f"run{self._num_runs}", oracles=self.oracles))
        asked = train(problem, steps=1, units=())
        record = judged(session, engine, training=asked, laws=(MatchesOracle(),))
        session.close()
        return record.verdict


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Farm:
    return Farm(tmp_path, monkeypatch)


def test_a_second_run_reuses_an_oracle(farm: Farm) -> None:
    assert (farm.run(), farm.run(), farm.num_computed) == (Verdict.PASSED, Verdict.PASSED, 1)


def test_another_engine_reuses_it_and_a_fresh_oracle_judges_its_failure(farm: Farm) -> None:
    farm.run()
    assert farm.run(engine="torch.fsdp2") is Verdict.PASSED
    assert farm.num_computed == 1
    assert farm.run(engine=BROKEN) is Verdict.FAILED
    assert farm.num_computed == 2


def test_a_stale_oracle_fails_no_engine(farm: Farm) -> None:
    """A model may read weights from a file that has changed since."""
    farm.run()
    (path,) = farm.oracles.iterdir()
    farm.run(replace(MLP_EVEN, loss=_halved))
    (other,) = {*farm.oracles.iterdir()} - {path}
    path.write_bytes(other.read_bytes())
    assert farm.run() is Verdict.PASSED
    assert farm.num_computed == 3
    assert path.read_bytes() != other.read_bytes()


def test_other_content_needs_another_oracle(farm: Farm) -> None:
    farm.run()
    farm.run(replace(MLP_EVEN, loss=_halved))
    assert farm.num_computed == 2


def test_another_installation_needs_another_oracle(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    farm.run()
    monkeypatch.setattr(kept_oracle, "_environment", lambda: b"another release")
    farm.run()
    assert farm.num_computed == 2


def test_content_without_a_digest_is_not_kept(farm: Farm) -> None:
    farm.run(replace(MLP_EVEN, loss=_Unreadable()))
    assert not farm.oracles.exists()


def test_a_failure_is_explained_by_an_oracle_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[bool]()

    # Any: as they came.
    def noted(*args: Any) -> bytes:
        asked.append(args[-2])  # before the device
        return ask(*args)

    monkeypatch.setattr(oracle_answer, "ask", noted)
    session = TrialSession(Source(folder=tmp_path / "run"))
    training = train(MLP_EVEN, steps=1, units=())
    engines = ("torch.ddp", BROKEN, BROKEN, "torch.ddp")
    records = [judged(session, engine, training=training, laws=(MatchesOracle(),)) for engine in engines]
    session.close()
    assert [record.verdict for record in records] == [
        Verdict.PASSED,
        Verdict.FAILED,
        Verdict.FAILED,
        Verdict.PASSED,
    ]
    for failed in records[1:3]:
        assert failed.worst is not None
        assert failed.worst.looks_like == "only this rank's own gradient: not synchronised"
    assert asked == [False, True]  # none for the third and fourth


def test_a_loss_scale_needs_another_oracle_only_if_a_step_is_skipped() -> None:
    plain = train(MLP_EVEN, units=())

    def scaled(scaling: LossScaling) -> Training:
        return replace(plain, schedule=replace(plain.schedule, scaling=scaling))

    assert arithmetic_of(scaled(LossScaling())) == arithmetic_of(plain)
    assert arithmetic_of(scaled(LossScaling(overflows_at=1))) != arithmetic_of(plain)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "changed": lambda data: data[:70] + b"x" + data[71:],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_oracle_is_computed_again(farm: Farm, damage: Callable[[bytes], bytes]) -> None:
    farm.run()
    (path,) = farm.oracles.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert farm.run() is Verdict.PASSED
    assert farm.num_computed == 2
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_no_verdict(farm: Farm) -> None:
    farm.oracles.write_text("a file")
    assert farm.run() is Verdict.PASSED


def _halved(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return MLP_EVEN.loss(output, target) / 2


class _Unreadable:
    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return MLP_EVEN.loss(output, target)

    def __reduce_ex__(self, protocol: object) -> Any:  # Any: as pickle has it
        if sys._getframe(1).f_code.co_filename.endswith("content.py"):
            raise TypeError("not for reading")
        return super().__reduce_ex__(4)


# Observations.


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


def test_third(trial: Trial) -> None:
    raise ValueError("a slip")
"""


def test_observations_that_a_failure_shares_with_a_pass_are_kept(tmp_path: Path) -> None:
    """The pass came first, and its world is not run again. A case that raises itself says what it raised."""
    (tmp_path / "test_shared.py").write_text(SHARED)
    options = ("--engine=torch.ddp", "--no-expectations", f"--out={tmp_path / 'run'}")
    assert call_pytest([str(tmp_path / "test_shared.py"), *options]) == pytest.ExitCode.TESTS_FAILED
    first, second, third = read_run(tmp_path / "run").records
    assert third.headline.startswith("the test gave no verdict: ValueError: "), third.headline
    assert (first.verdict, second.verdict) == (Verdict.PASSED, Verdict.FAILED)
    assert (first.observation, bool(second.observation)) == ("", True)
    assert (tmp_path / "run" / second.observation / "rank0.observation").is_file()
