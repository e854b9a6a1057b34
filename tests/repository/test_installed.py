"""An installation of the package adds one import name, which no folder of the caller hides, and hides none."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from tests.shell import ROOT, Done, python

pytestmark = pytest.mark.timeout(300)  # a process that imports torch, and others below it

OURS = ("engine", "fixtures", "harness", "reports", "suites")
MODEL = """
import torch
from torch import nn
import harness  # the caller's own

class Mine:
    def build(self):
        return nn.Linear(4, harness.WIDTH)
    def batch(self, generator):
        return torch.randn(3, 4, generator=generator)
    def loss(self, output, batch):
        return output.square().mean()
"""
TESTS = """
from shardproof import check
from mine import Mine as Base

class Mine(Base):
    pass

def test_right():
    check(Mine, engine="torch.ddp", keyword="trains")

def test_wrong():
    check("mine.py:Mine", engine="shardproof.engine.mutants.gradient_scale:SumsInsteadOfAveraging", keyword="trains")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with ours alone: links of the clone become the files behind them."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "shardproof", site / "shardproof", ignore=shutil.ignore_patterns("__pycache__"))
    return site


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's repository, with packages of our names."""
    folder = tmp_path_factory.mktemp("repository")
    for name in OURS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('imported by mistake')\n")
    (folder / "harness" / "__init__.py").write_text("WIDTH = 2\n")
    (folder / "mine.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def smoke(site: Path, repository: Path) -> Done:
    """A run in the user's repository, kept in its folder `run`."""
    worlds = ("--world", "threads:2", "--world", "processes:2")
    return _shardproof(
        site, repository, "run", "--suite", "smoke", "--engine", "torch.ddp", *worlds, "--out", "run"
    )


def _shardproof(site: Path, folder: Path, *arguments: str) -> Done:
    return _python(site, folder, "-m", "shardproof", *arguments)


def _python(site: Path, folder: Path, *arguments: str) -> Done:
    return python(*arguments, cwd=folder, limit_s=280, PYTHONPATH=str(site))


@pytest.mark.slow
def test_cases_run_in_a_repository_with_folders_of_our_names(
    site: Path, repository: Path, smoke: Done
) -> None:
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    assert "\nConforming: " in smoke.stdout
    assert {record.world for record in read_run(repository / "run").records} == {"threads:2", "processes:2"}
    assert _shardproof(site, repository, "report", "run").returncode == 0


@pytest.mark.slow
def test_a_repeat_command_works_where_the_run_was_started(site: Path, repository: Path, smoke: Done) -> None:
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    records = read_run(repository / "run").records
    command = next(record.command for record in records if record.verdict is Verdict.PASSED)
    assert command.startswith(("shardproof run --case smoke/", "shardproof run --case 'smoke/"))
    again = _shardproof(site, repository, *shlex.split(command)[1:], "--out", "again")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(read_run(repository / "again").records) == 1


@pytest.mark.slow
def test_a_model_may_import_packages_of_our_names(site: Path, repository: Path) -> None:
    done = _shardproof(site, repository, "check", "mine.py:Mine", "--engine", "torch.ddp", "-k", "trains")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proven        trains as one process does\n" in done.stdout


@pytest.mark.slow
def test_a_users_test_checks_a_model(site: Path, repository: Path) -> None:
    (repository / "test_mine.py").write_text(TESTS)
    done = _python(site, repository, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    shown = " ".join(done.stdout.split())
    assert "1 failed, 1 passed" in shown, done.stdout + done.stderr
    assert "exactly 2 x the reference" in shown
    assert "repeat shardproof check mine.py:Mine --engine" in shown


def test_the_package_adds_one_name() -> None:
    import shardproof

    assert {path.name for path in (ROOT / "shardproof").iterdir() if path.is_symlink()} == set(OURS)
    assert {"Engine", "Plan", "Problem", "MatchesOracle", "Trial", "UserModel"} <= set(dir(shardproof))
    for name in dir(shardproof):
        assert getattr(shardproof, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Plann'"):
        _ = shardproof.Plann  # type: ignore[attr-defined]


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("shardproof 0.")
