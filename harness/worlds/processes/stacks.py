"""Reads stacks that faulthandler and tracebacks print, and reduces them to the frames of the engine or the model."""

from __future__ import annotations

import re
from pathlib import Path

from shardproof.harness.tracing.collectives.call_site import is_internal_frame, short_path

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+?)\s*$', re.MULTILINE)
# The paths of torch's own engines; other frames of torch only lead from one frame of the engine or the model to the
# next.
_ENGINES_OF_TORCH = ("torch/distributed/", "torch/nn/parallel/")
_LIBRARIES = re.compile(r"^/.*/lib/python3[^/]*/(?!site-packages/)")


def frames_of(text: str) -> tuple[str, ...]:
    """Return the frames of a stack as ``file.py:line in function``, the innermost first.

    A traceback has the opposite order, and may contain several errors; the last one counts.
    """
    return tuple(map(_spell, _innermost_first(text)))


def own_frames(text: str) -> tuple[str, ...]:
    """Return the frames of the engine or the model, innermost first; empty if there are none."""
    return tuple(_spell(match) for match in _innermost_first(text) if _is_own(match["file"]))


def is_in_passage(text: str) -> bool:
    """Return whether the innermost frame of a stack is on the way of a call to the backend, or in the harness."""
    found = _innermost_first(text)
    return bool(found) and (
        is_internal_frame(found[0]["file"]) or short_path(found[0]["file"]).startswith("harness/")
    )


def _innermost_first(text: str) -> list[re.Match[str]]:
    _, traceback, last = text.rpartition(_TRACEBACK)
    found = list(_FRAME.finditer(last))
    return found[::-1] if traceback else found


def _spell(match: re.Match[str]) -> str:
    return f"{short_path(match['file'])}:{match['line']} in {match['function']}"


def _is_own(file: str) -> bool:
    name = short_path(file)
    if file.startswith("<") or is_internal_frame(file) or name.startswith("harness/"):
        return False
    if name.startswith("torch/"):
        return name.startswith(_ENGINES_OF_TORCH)
    return _LIBRARIES.match(file) is None


_MOST_CHARACTERS = 2**24  # of a file that the process of a rank writes
_SECTION = re.compile(
    r"^(?P<current>Current thread|Thread) (?P<ident>0x[0-9a-f]+)[^\n]*\n(?P<frames>(?:  [^\n]*\n?)*)",
    re.MULTILINE,
)


def stack_of(stack_file: Path, thread_ident: int) -> str:
    """Return the latest stack of one thread, innermost frame first; empty when the file has none."""
    found = [m["frames"] for m in _sections(stack_file) if int(m["ident"], 16) == thread_ident]
    return found[-1].rstrip() if found else ""


def crashed_thread(stack_file: Path) -> tuple[int, str] | None:
    """Return the thread in which the process crashed and its stack; None when faulthandler saw no crash."""
    if "Fatal Python error" not in _text(stack_file):
        return None
    current = [m for m in _sections(stack_file) if m["current"] == "Current thread"]
    return (int(current[-1]["ident"], 16), current[-1]["frames"].rstrip()) if current else None


def _sections(stack_file: Path) -> list[re.Match[str]]:
    return list(_SECTION.finditer(_text(stack_file)))


def _text(stack_file: Path) -> str:
    if not stack_file.is_file():  # a rank may have created a pipe there
        return ""
    with stack_file.open(errors="replace") as file:
        return file.read(_MOST_CHARACTERS)
