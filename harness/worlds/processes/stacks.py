"""Reading the stacks that faulthandler left in a host's file."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["crashed_thread", "stack_of"]

_SECTION = re.compile(
    r"^(?P<current>Current thread|Thread) (?P<ident>0x[0-9a-f]+)[^\n]*\n(?P<frames>(?:  [^\n]*\n?)*)",
    re.MULTILINE,
)


def stack_of(stack_file: Path, thread_ident: int) -> str:
    """Give the latest stack of one thread, innermost frame first; empty when the file has none."""
    found = [m["frames"] for m in _sections(stack_file) if int(m["ident"], 16) == thread_ident]
    return found[-1].rstrip() if found else ""


def crashed_thread(stack_file: Path) -> tuple[int, str] | None:
    """Give the thread in which the process crashed and its stack; None when faulthandler saw no crash."""
    if "Fatal Python error" not in _text(stack_file):
        return None
    current = [m for m in _sections(stack_file) if m["current"] == "Current thread"]
    return (int(current[-1]["ident"], 16), current[-1]["frames"].rstrip()) if current else None


def _sections(stack_file: Path) -> list[re.Match[str]]:
    return list(_SECTION.finditer(_text(stack_file)))


def _text(stack_file: Path) -> str:
    return stack_file.read_text(errors="replace") if stack_file.exists() else ""
