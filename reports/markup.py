"""Pieces of Markdown: escaped text, code spans, tables, and a budget of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardproof.reports.text import clip, one_line

_MOST_LISTED = 20
_LONGEST_BLOCK = 4_000  # characters
_SPECIAL = re.compile(r"([\\`*_\[\]<>#&|~$])")


class Budget:
    """Counts down the remaining bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._left_bytes = num_bytes

    def takes(self, text: str) -> bool:
        """Reserve room for ``text`` if it fits."""
        need = num_bytes(text) + 2  # and the empty line after it
        if need > self._left_bytes:
            return False
        self._left_bytes -= need
        return True


def num_bytes(text: str) -> int:
    """Count the bytes of a text in a file."""
    return len(text.encode("utf-8", errors="backslashreplace"))


def escape(text: str, limit: int = 300) -> str:
    """Escape one line, so that an engine's text cannot become markup."""
    return _SPECIAL.sub(r"\\\1", one_line(text, limit))


def code(text: str, limit: int = 300) -> str:
    """Quote as code; the fence is longer than any run of backticks in the text, so that the text cannot end it."""
    line = one_line(text, limit)
    ticks = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if "`" in line else ""
    return f"{ticks}{pad}{line}{pad}{ticks}" if line else ""


def block(text: str) -> str:
    """Quote lines, such as one rank's stack, with the middle of a long text left out."""
    clipped = clip(text, _LONGEST_BLOCK)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", clipped)), default=0))
    return f"{fence}text\n{clipped}\n{fence}"


def listed(title: str, texts: Sequence[str]) -> list[str]:
    """Write a title and a list of plain texts, the first of many; nothing if there are none."""
    lines = [f"- {escape(text)}" for text in texts[:_MOST_LISTED]]
    if len(texts) > _MOST_LISTED:
        lines.append(f"- and {len(texts) - _MOST_LISTED} more")
    return ["\n".join([title, "", *lines])] if texts else []


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table whose cells are already Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
