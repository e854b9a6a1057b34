"""The mutants: each loads, promises what its honest base promises, and cites a public report."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import shardproof.engine.mutants
from shardproof.engine import registry
from shardproof.engine.adapters.manual_finalization import ManualFinalizationEngine
from shardproof.engine.contract import Engine
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.registry import BUILT_IN, THIRD_PARTY, EngineNotFoundError, resolve, what_is_missing
from tests.shell import ROOT, Done, python

HONEST: set[type[Engine]] = {ManualFinalizationEngine, *(type(resolve(name)) for name in BUILT_IN)}
CLASSES = [
    value
    for info in pkgutil.iter_modules(shardproof.engine.mutants.__path__, prefix="shardproof.engine.mutants.")
    for value in vars(importlib.import_module(info.name)).values()
    if inspect.isclass(value) and value.__module__ == info.name
]
ENGINES = [(mutant, resolve(mutant.engine_spec)) for mutant in MUTANTS]


def test_each_is_built_on_one_honest_engine_and_promises_the_same() -> None:
    for mutant, faulty in ENGINES:
        assert type(faulty) not in HONEST
        base = next(base for base in type(faulty).__mro__ if base in HONEST)
        # A dishonest mutant lies about itself; every other mutant declares what its base declares.
        if type(faulty).__module__ != "shardproof.engine.mutants.refusals":
            assert faulty.capabilities == base.capabilities, mutant.name
        assert faulty.name == f"mutant.{mutant.name}" == f"mutant.{type(faulty).__name__}"


def test_each_nests_only_classes_that_are_put_in_place() -> None:
    """Under another name the engine would not use the wrong class, and the mutant would be honest."""
    for faulty in (type(engine) for _, engine in ENGINES):
        nested = {
            name
            for name, value in vars(faulty).items()
            if inspect.isclass(value) and value.__qualname__ == f"{faulty.__qualname__}.{name}"
        }
        assert nested <= {"Prepared", "Unit", "Wrapper"}, faulty.__name__


def test_the_registry_names_every_mutant_once() -> None:
    found = {f"{value.__module__}:{value.__name__}" for value in CLASSES if issubclass(value, Engine)}
    assert sorted(m.engine_spec for m in MUTANTS) == sorted(found)
    assert len({m.fault for m in MUTANTS}) == len(MUTANTS)


def test_each_cites_a_public_report() -> None:
    assert [m.name for m in MUTANTS if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", m.thread)] == []


def test_no_two_modules_have_a_class_of_one_name() -> None:
    repeated = [name for name, times in Counter(value.__name__ for value in CLASSES).items() if times > 1]
    assert repeated == []


# Engines of other packages.


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_each_adapter_is_in_its_registered_module_under_its_own_name(name: str) -> None:
    module, _, attribute = THIRD_PARTY[name].partition(":")
    source = (ROOT / f"{module.removeprefix('shardproof.').replace('.', '/')}.py").read_text()
    (found,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == attribute)
    named = [ast.unparse(n) for n in found.body if isinstance(n, ast.Assign)]
    assert any((n.startswith("name = ") and repr(name) in n) or f"({name!r}," in n for n in named), named


def test_a_missing_package_is_named_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(
        EngineNotFoundError, match=r"needs lightning_fabric, .* pip install 'shardproof\[lightning\]'"
    ):
        resolve("lightning.ddp")
    assert not what_is_missing("torch.ddp")


def test_the_packages_to_install_are_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    families = {name.partition(".")[0] for name in THIRD_PARTY}
    assert families - registry._WITHOUT_EXTRA.keys() == extras.keys() - {"bench", "dev", "docs", "explore"}


# Entry points.


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
