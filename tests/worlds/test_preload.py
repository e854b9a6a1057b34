"""Modules that an engine preloads are imported once for its ranks, and for no other process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from shardproof import RankContext, Returned, TrialSession, Verdict, WorldKind, WorldSpec, launch
from shardproof.engine.registry import EngineNotFoundError
from shardproof.harness.runner.engines import describe
from shardproof.harness.worlds.processes.forkserver import hash_seeds
from shardproof.harness.worlds.processes.fresh_process import ask
from tests.judging import judged
from tests.shell import python

MODULE = "tests.worlds.imported_once"


def _found(_: RankContext) -> tuple[bool, str]:
    return MODULE in sys.modules, os.environ["PYTHONHASHSEED"]


def _found_by_an_oracle() -> bytes:
    return str(MODULE in sys.modules).encode()


@pytest.mark.parametrize("world", ["threads:2", "processes:2"])
def test_a_rank_that_imports_its_engine_anew_does_so_unless_it_is_preloaded(
    session: TrialSession, world: str
) -> None:
    anew = judged(session, f"{MODULE}:ImportsItsModule", world)
    assert (anew.verdict, "imported the module anew" in anew.headline) == (Verdict.CRASHED, True)
    once = judged(session, f"{MODULE}:WantsItsModule", world)
    assert once.verdict is Verdict.PASSED, once.headline


def test_a_module_is_preloaded_only_in_its_own_world_with_the_hash_seeds_of_others(tmp_path: Path) -> None:
    for name, preload, is_there in (
        ("it", (MODULE,), True),
        ("other", ("tests.values",), False),
        ("none", (), False),
    ):
        world = WorldSpec(kind=WorldKind.PROCESSES, size=2, preload=preload)
        outcomes = launch(world, _found, folder=tmp_path / name).outcomes
        found = [o.value for o in outcomes if isinstance(o, Returned)]
        assert found == [(is_there, str(seed)) for seed in hash_seeds(0)[:2]]
        assert ask(30, 100, _found_by_an_oracle) == b"False"


def test_a_module_that_is_missing_is_named() -> None:
    with pytest.raises(EngineNotFoundError, match=r"preload raised .*tests\.no_such_module"):
        describe(f"{MODULE}:WantsWhatIsMissing")


def test_prints_of_modules_at_import_are_no_part_of_the_output_of_the_session(tmp_path: Path) -> None:
    arguments = ("--engine", f"{MODULE}:WantsItsModule", "--world", "processes:2", "--suite", "smoke")
    done = python("-m", "shardproof", "run", *arguments, "--json", "--out", str(tmp_path / "run"))
    assert json.loads(done.stdout)["conforms"], done.stderr
    assert "imported" in done.stderr
