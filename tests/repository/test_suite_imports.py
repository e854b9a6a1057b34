"""Imports of the suites: names of one module in order, as many on a line as fit, and each line a statement.

A case needs a dozen names of the public interface, each of which the formatter would put on a line of its own.
`python -m tests.repository.test_suite_imports` rewrites what this test finds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def imports_of(source: str) -> Iterator[tuple[slice, list[str]]]:
    """Find the lines that import from one module, and their packed form."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    for module, group in groupby(nodes, key=lambda node: node.module or ""):
        found = list(group)
        aliases = [alias for node in found for alias in node.names]
        if not any(alias.asname for alias in aliases):
            where = slice(found[0].lineno - 1, found[-1].end_lineno)
            yield where, packed(module, [alias.name for alias in aliases])


@pytest.mark.parametrize("path", SUITES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_packed(path: Path) -> None:
    source = path.read_text()
    for where, expected in imports_of(source):
        assert source.splitlines()[where] == expected


def test_a_name_goes_to_the_next_line_where_it_does_not_fit() -> None:
    names = [f"Name{index:04}" for index in range(10)]
    assert packed("a", [*names, "shown", "FIRST"]) == [
        "from a import FIRST, " + ", ".join(names[:9]),
        "from a import Name0009, shown",
    ]


def _rewrite(path: Path) -> None:
    lines = path.read_text().splitlines()
    for where, expected in reversed(list(imports_of(path.read_text()))):
        lines[where] = expected
    path.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    for suite in SUITES:
        _rewrite(suite)
