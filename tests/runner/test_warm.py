"""Preloaded modules, which worlds and oracles fork, change nothing of torch: built-in engines patch nothing."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest
from tests.shell import python

# All objects that a training could meet, by identity, before and after the imports; new names do not count.
_SCRIPT = """
import sys
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.optim

def seen():
    owners = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "torch" and m is not None}
    for name, module in list(owners.items()):
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                owners[f"{name}.{key}"] = value
    return {
        f"{name}:{key}": id(value)
        for name, owner in owners.items()
        for key, value in list(vars(owner).items())
        if callable(value)
    }

before = seen()
import shardproof.harness.runner.preload
after = seen()
assert len(before) > 10_000, len(before)
assert "shardproof.engine.reference" in sys.modules
print("changed", sorted(key for key, value in before.items() if after.get(key) != value))
"""


def test_preloaded_modules_change_nothing_of_torch() -> None:
    done = python("-c", _SCRIPT)
    assert done.stdout.strip() == "changed []", done.stdout[-2000:] + done.stderr[-2000:]


# Worlds of odd sizes.


WORLD = "threads:7"
FINE = {Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.KNOWN_FAILURE}


class _Ids:
    """A plugin that keeps the collected cases."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.nodeid for item in session.items]


def _one_of_each_suite(engine: str, position: int) -> list[str]:
    plugin = _Ids()
    assert call_pytest(["suites", f"--engine={engine}", f"--world={WORLD}", "--collect-only"], plugin) == 0
    suites = [[*cases] for _, cases in groupby(plugin.ids, key=lambda case: case.split("/")[1])]
    assert len(suites) > 20
    return [cases[position] for cases in suites]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "position"), [("reference", -1), ("torch.fsdp1", 0)])
def test_honest_engines_conform(engine: str, position: int, tmp_path: Path) -> None:
    cases = _one_of_each_suite(engine, position)
    assert call_pytest([*cases, f"--engine={engine}", f"--world={WORLD}", f"--out={tmp_path}"]) == 0
    records = read_run(tmp_path).records
    assert len(records) == len(cases)
    assert {record.verdict for record in records} <= FINE
    assert sum(record.verdict is Verdict.PASSED for record in records) > 10
