"""Words that docstrings and pages avoid, because they hide the subject or are not the field's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.shell import ROOT

FOLDERS = (
    "harness",
    "engine",
    "reports",
    "suites",
    "fixtures",
    "benchmarks",
    "campaigns",
    "examples",
    "tests",
)
AVOIDED = re.compile(r"\b(whoever|nobody|somebody|is told|are told|was told|were told)\b", re.IGNORECASE)
OPENINGS = re.compile(r"(Give|Tell|Say|Have|Spell)\b")
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _docstrings() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def test_docstrings_name_their_subject() -> None:
    found = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in _docstrings()
        if OPENINGS.match(text) or AVOIDED.search(text)
    ]
    assert not found, "\n".join(found)


def test_pages_name_their_subject() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{page.relative_to(ROOT)}:{number}: {line}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if AVOIDED.search(line)
    ]
    assert not found, "\n".join(found)
