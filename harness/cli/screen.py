"""Printing a report: with colours on a terminal, as plain text elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_NARROWEST, _WIDTH, _WIDEST = 80, 100, 160
_CELLS = re.compile(r"^ {2}\S.*?(?P<cells>(?: +[-.A-Zk]{1,3})+)$", re.MULTILINE)


def width() -> int:
    """Return how many columns a report may take: the terminal's, within reason; 100 in a pipe."""
    return min(max(shutil.get_terminal_size((_WIDTH, 24)).columns, _NARROWEST), _WIDEST)


def show(text: str) -> None:
    """Print a report; in colours if rich detects a terminal or FORCE_COLOR is set, and NO_COLOR is not."""
    if not sys.stdout.isatty() and "FORCE_COLOR" not in os.environ:
        print(text)
        return
    from rich.console import Console

    Console(highlight=False).print(styled(text), soft_wrap=True)


def styled(text: str) -> Text:
    """Colour the verdicts of a text, by name and as letters in the cells of a matrix."""
    from rich.text import Text

    made = Text(text)
    for pattern, style in _styles():
        made.highlight_regex(pattern, style)
    for row in _CELLS.finditer(text):
        for letter in re.finditer(r"\S", row["cells"]):
            start = row.start("cells") + letter.start()
            made.stylize(_letters().get(letter[0], ""), start, start + 1)
    return made


def _styles() -> Iterator[tuple[str, str]]:
    from shardproof.reports.verdict_style import MARKS

    for verdict, mark in MARKS.items():
        yield rf"\b{verdict}\b", _TONES[mark.tone.value]
    yield r"(?m)^Conforming\b", "bold green"
    yield r"(?m)^(Not conforming|Not proven|NOT PROVEN|Incomplete|Nothing judged)\b", "bold red"
    yield r"(?m)^(WARNING|STALE)\b", "yellow"
    yield r"(?m)^ +repeat .*$", "dim"


def _letters() -> dict[str, str]:
    from shardproof.reports.verdict_style import MARKS

    return {mark.letter: _TONES[mark.tone.value] for mark in MARKS.values()}


_TONES = {"good": "green", "bad": "bold red", "doubtful": "yellow", "known": "cyan", "muted": "dim"}
