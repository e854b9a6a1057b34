"""Adapters of engines in other packages, none of which is installed here: their places and names."""

from __future__ import annotations

import ast
import tomllib

import pytest

from shardproof.engine import registry
from shardproof.engine.registry import THIRD_PARTY, EngineNotFoundError, resolve, what_is_missing
from tests.shell import ROOT


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
    assert families - registry._WITHOUT_EXTRA.keys() == extras.keys() - {"bench", "dev", "explore"}
