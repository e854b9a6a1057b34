"""Engines of other packages are known by the names of their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shell import Done, python

ADAPTER = """
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine

class Theirs(DistributedDataParallelEngine):
    name = "theirs"
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed package that names two engines, one of them with the name of a built-in engine."""
    (tmp_path / "their_engine.py").write_text(ADAPTER)
    metadata = tmp_path / "their_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[shardproof.engines]\ntheirs = their_engine:Theirs\ntorch.ddp = their_engine:Missing\n"
    )
    return tmp_path


def _shardproof(site: Path, *arguments: str) -> Done:
    return python("-m", "shardproof", *arguments, PYTHONPATH=str(site))


@pytest.mark.slow
def test_an_engine_of_a_package_is_judged_by_its_name(site: Path) -> None:
    options = ("--suite", "smoke", "--world", "threads:2", "--out", str(site / "run"))
    done = _shardproof(site, "run", "--engine", "theirs", "--engine", "torch.ddp", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 declared passed" in done.stdout


@pytest.mark.slow
def test_an_engine_of_a_package_is_listed(site: Path) -> None:
    listed = _shardproof(site, "list").stdout
    assert "  theirs " in listed
    assert "unavailable" not in listed


def test_a_misspelt_name_is_compared_with_those_of_packages(site: Path) -> None:
    done = _shardproof(site, "run", "--engine", "thiers", "--out", str(site / "run"))
    assert done.returncode == 2
    assert "did you mean 'theirs'?" in done.stderr
