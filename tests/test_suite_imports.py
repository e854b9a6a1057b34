"""Imports of the suites: names of one module in order, as many on a line as fit, and each line a statement.

A case needs a dozen names of the public interface. The formatter would put each on a line of its own.
"""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

import pytest

from tests.shell import ROOT

SUITES = sorted((ROOT / "suites").rglob("*.py"))
LINE_LENGTH = 110


def packed(module: str, names: list[str]) -> list[str]:
    """Return the statements that import these names: constants, then classes, then functions."""
    lines = [f"from {module} import"]
    for name in sorted(names, key=lambda name: (not name.isupper() or len(name) == 1, name.islower(), name)):
        if len(f"{lines[-1]} {name},") > LINE_LENGTH + 1:  # its comma becomes the end of the line
            lines.append(f"from {module} import")
        lines[-1] += f" {name},"
    return [line.removesuffix(",") for line in lines]


@pytest.mark.parametrize("path", SUITES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_packed(path: Path) -> None:
    source = path.read_text()
    imports = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and not node.names[0].asname
    ]
    for module, nodes in groupby(imports, key=lambda node: node.module or ""):
        found = list(nodes)
        names = [alias.name for node in found for alias in node.names]
        lines = source.splitlines()[found[0].lineno - 1 : found[-1].end_lineno]
        assert lines == packed(module, names)


def test_a_name_goes_to_the_next_line_where_it_does_not_fit() -> None:
    names = [f"Name{index:04}" for index in range(10)]
    assert packed("a", [*names, "shown", "FIRST"]) == [
        "from a import FIRST, " + ", ".join(names[:9]),
        "from a import Name0009, shown",
    ]
