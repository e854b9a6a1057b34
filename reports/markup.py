"""Pieces of Markdown: escaped text, code spans, tables, and a budget of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardproof.reports.text import one_line

_MOST_LISTED = 20
_SPECIAL = re.compile(r"([\\`*_\[\]<>#&|~$])")


class Budget:
    """Counts down the bytes that are still free."""

    def __init__(self, num_bytes: int) -> None:
        self._left_bytes = num_bytes

    def takes(self, text: str) -> bool:
        """Set room aside for ``text`` if there is any."""
        need = num_bytes(text) + 2  # and the empty line after it
        if need > self._left_bytes:
            return False
        self._left_bytes -= need
        return True


def num_bytes(text: str) -> int:
    """Count the bytes of a text as a file holds it."""
    return len(text.encode("utf-8", errors="backslashreplace"))


def escape(text: str, limit: int = 300) -> str:
    """Escape one line, so that no engine's text becomes markup."""
    return _SPECIAL.sub(r"\\\1", one_line(text, limit))


def code(text: str, limit: int = 300) -> str:
    """Quote as code; a fence longer than any run of backticks inside keeps the text from ending it."""
    line = one_line(text, limit)
    ticks = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if "`" in line else ""
    return f"{ticks}{pad}{line}{pad}{ticks}" if line else ""


def listed(title: str, texts: Sequence[str]) -> list[str]:
    """Write a title and a list of plain texts, the first of many; nothing for no text."""
    lines = [f"- {escape(text)}" for text in texts[:_MOST_LISTED]]
    if len(texts) > _MOST_LISTED:
        lines.append(f"- and {len(texts) - _MOST_LISTED} more")
    return ["\n".join([title, "", *lines])] if texts else []


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table of cells that are Markdown already."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
