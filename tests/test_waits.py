"""The page on waits lists every wait in the sources of FSDP2, FSDP1 and the reference engine, and its mutants."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.mutants.mutant import Trace
from tests.shell import ROOT

PAGE = (ROOT / "docs" / "waits.md").read_text(encoding="utf-8")
FSDP = Path(torch.__path__[0]) / "distributed" / "fsdp"
REFERENCE = ROOT / "engine" / "reference"
Call = tuple[str, str, str]  # file, function and the call as Python would spell it

_WAITS = {
    *("wait_stream", "wait_event", "wait", "synchronize", "record", "record_event", "record_stream"),
    "_no_dispatch_record_stream",
}
# Methods of the engine that lead to waits and are none.
_NOT_WAITS = {"handle.wait()", "self.wait()", "group.wait()", "self._fsdp_state.wait()"}


def _calls(file: Path) -> Iterator[Call]:
    yield from _calls_in(ast.parse(file.read_text(encoding="utf-8")), file.name, "")


def _calls_in(node: ast.AST, file: str, function: str) -> Iterator[Call]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            called = child.func
            name = (
                called.attr
                if isinstance(called, ast.Attribute)
                else called.id
                if isinstance(called, ast.Name)
                else ""
            )
            if name in _WAITS:
                yield file, inside, ast.unparse(child)
        yield from _calls_in(child, file, inside)


def _rows(section: str) -> Counter[Call]:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\S+\.py) \| (\w+) \| `(.+?)` \| (\d+) \| \S.* \|$", text, flags=re.MULTILINE)
    return Counter({(file, function, call): int(times) for file, function, call, times in rows})


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the page is that of one release of torch"
)
@pytest.mark.parametrize(
    ("section", "files"),
    [
        ("FSDP2", sorted((FSDP / "_fully_shard").glob("*.py"))),
        ("FSDP1", [FSDP / "_runtime_utils.py", FSDP / "_flat_param.py"]),
    ],
    ids=["fsdp2", "fsdp1"],
)
def test_names_every_wait_of_torch(section: str, files: list[Path]) -> None:
    assert _rows(section) == Counter(call for file in files for call in _calls(file))


def test_names_every_wait_of_the_reference_engine() -> None:
    found = [call for file in sorted(REFERENCE.rglob("*.py")) for call in _calls(file)]
    assert _rows("The reference engine") == Counter(call for call in found if call[2] not in _NOT_WAITS)


def test_names_every_mutant_of_races_and_no_other() -> None:
    racy = {mutant.name for mutant in MUTANTS if mutant.trace is Trace.RACES}
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE))
    # FreesTheReduceInput leaves out no wait: it does not keep its buffers.
    assert named | {"FreesTheReduceInput"} == racy
