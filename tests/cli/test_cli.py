"""The command line refuses wrong names before a case runs, and a hang ends with a verdict, not with the session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardproof import Plan, PreparedModel, Verdict
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.registry import known_engines, what_is_missing
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.cli import engine_list
from shardproof.harness.cli.main import main
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest
from tests.sample_records import TRAINS, records_by_engine
from tests.shell import ROOT, python


class Stuck(DistributedDataParallelEngine):
    """Hangs in prepare on rank 1."""

    def prepare(self, model: object, plan: Plan, mesh: object) -> PreparedModel:
        import threading

        import torch.distributed as dist

        if dist.get_rank() == 1:
            threading.Event().wait()
        return super().prepare(model, plan, mesh)  # type: ignore[arg-type]  # passed on unchanged


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "--engine", "torch.fdsp2"], "did you mean 'torch.fsdp2'?"),
        (["run", "--engine", "no/such/file.py:Engine"], "expected a Python file"),
        (
            ["run", "--engine", "shardproof.engine.adapters.torch_ddp:Distribted"],
            "did you mean 'DistributedDataParallel'?",
        ),
        (["run", "--world", "thread:4"], "try --world threads:4"),
        (["run", "--world", "threads:0"], "1 to 64 ranks"),
        (["run", "--world", "simulated:4:cuda"], "try --world processes:4:cuda"),
        (["run", "--suite", "parrity"], "try --suite parity"),
        (["mutants", "--suite", "smok"], "try --suite smoke"),
        (["mutants", "--world", "thread:4"], "try --world threads:4"),
        (["mutants", "--world", "gpu"], "expected an accelerator that torch finds"),
        (
            ["check", "any.py:Mine", "--world", "gpu"],
            "expected an accelerator that torch finds on this machine",
        ),
        (
            ["explore", "--engine", "torch.ddp", "--world", "gpu"],
            "expected an accelerator that torch finds on this machine",
        ),
        (["coverage", "no/such/run"], "no such folder"),
        (["coverage", "--api", "fsdp9"], "expected one of: fsdp1, got 'fsdp9'"),
        (["judge", "no/such/run"], "no such folder"),
        (["report", "no/such/run"], "no such folder"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_name_is_a_usage_error_with_a_hint(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "run")] if arguments[0] in {"run", "mutants"} else []
    assert main([*arguments, *out]) == 2
    assert hint in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "a run that never began must leave no files"


def test_list_names_engines_and_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("torch.ddp", "torch.fsdp2", "torch.replicate", "smoke", "parity"))
    assert "upstream" not in printed, "a folder without cases is no suite"


def test_list_asks_each_engine_that_is_built_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(engine_list, "_SOURCES", tmp_path)
    (tmp_path / "adapter.py").touch()
    asked: list[str] = []

    def ask(name: str) -> str:
        asked.append(name)
        return f"SHARD, asked {len(asked)} times"

    monkeypatch.setattr(engine_list, "_ask", ask)
    lists = []
    for change in ("", "", "changed"):
        (tmp_path / "adapter.py").write_text(change)
        os.utime(tmp_path / "adapter.py", ns=(0, 0))
        assert main(["list"]) == 0
        lists.append(capsys.readouterr().out)
    assert lists[0] == lists[1] != lists[2]
    present = [name for name in known_engines() if not what_is_missing(name)]
    assert len(asked) == 2 * len(present)
    (kept,) = (tmp_path / ".cache" / "shardproof").iterdir()
    kept.write_text("no JSON")
    assert main(["list"]) == 0
    assert len(asked) == 3 * len(present)


def test_list_names_every_case_as_records_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--cases"]) == 0
    cases = capsys.readouterr().out.partition("cases:\n")[2].splitlines()
    assert "  smoke/test_smoke.py::test_trains_the_same_model" in cases
    assert len(set(cases)) == len(cases) > 50


def test_pytest_reports_a_path_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert call_pytest(["suites/no_such_suite.py"]) == pytest.ExitCode.USAGE_ERROR
    printed = capsys.readouterr()
    assert "no_such_suite.py" in printed.err
    assert "INTERNALERROR" not in printed.out + printed.err


@pytest.mark.slow
def test_plugins_that_happen_to_be_installed_are_left_out(tmp_path: Path) -> None:
    warns = (
        "import warnings\n\ndef pytest_configure():\n    warnings.warn('of a plugin', DeprecationWarning)\n"
    )
    (tmp_path / "warns.py").write_text(warns)
    about = tmp_path / "warns-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: warns\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[pytest11]\nwarns = warns\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    smoke, out = "suites/smoke", str(tmp_path / "out")
    collected = python("-m", "pytest", "--collect-only", smoke, f"--out={out}", PYTHONPATH=path)
    assert collected.returncode == 0, collected.stdout
    listed = python("-m", "shardproof", "list", "--cases", PYTHONPATH=path)
    assert listed.returncode == 0, listed.stderr


def test_a_hang_is_judged_before_pytest_times_out(tmp_path: Path) -> None:
    out = tmp_path / "run"
    engines = ["--engine=tests.cli.test_cli:Stuck", "--engine=torch.ddp"]
    options = ["-q", "-pno:cacheprovider", "--world=threads:2", "--timeout=8", f"--out={out}", "-n1"]
    finished = python("-m", "pytest", "suites/smoke", *engines, *options)

    assert finished.returncode == 1, finished.stdout + finished.stderr
    run = read_run(out)
    trained = records_by_engine(run.records, TRAINS)
    assert {engine: record.verdict for engine, record in trained.items()} == {
        "tests.cli.test_cli:Stuck": Verdict.HUNG,
        "torch.ddp": Verdict.PASSED,
    }
    assert run.footer is not None
    outcomes = trained["tests.cli.test_cli:Stuck"].outcomes
    assert any("in prepare" in outcome.text for outcome in outcomes), "the stack must show the hanging call"


def test_the_controller_of_workers_does_not_wait_for_torch() -> None:
    smoke = [str(ROOT / "suites" / "smoke"), "--engine=torch.ddp", "--world=threads:2", "-n1"]
    program = "\n".join(
        (
            "import sys",
            "from shardproof.harness.runner.invoke import call_pytest",
            f"code = call_pytest({smoke})",
            "sys.exit(code or ('torch was imported' if 'torch' in sys.modules else 0))",
        )
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


class _RaisesAtTheEnd:
    def pytest_unconfigure(self) -> None:
        """Raise at the end, as warnings about open files of a killed worker do."""
        raise RuntimeError("too late")


def test_an_error_as_pytest_ends_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    selected = [str(SUITES / "smoke"), "--collect-only", "--engine=torch.ddp", "--world=threads:2"]
    assert call_pytest(selected, _RaisesAtTheEnd()) == pytest.ExitCode.INTERNAL_ERROR
    assert "too late" in capsys.readouterr().err
