"""The mutants: each loads, promises what its honest base promises, and cites a public report."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections import Counter

import shardproof.engine.mutants
from shardproof.engine.adapters.manual_finalization import ManualFinalizationEngine
from shardproof.engine.contract import Engine
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.registry import BUILT_IN, resolve

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
