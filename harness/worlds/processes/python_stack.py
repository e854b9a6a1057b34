"""Stacks as text: read from what faulthandler and tracebacks print, and cut down to what the engine or the model is."""

from __future__ import annotations

import re

from harness.tracing.collectives.call_site import is_internal_frame, short_path

__all__ = ["frames_of", "is_in_passage", "own_frames"]

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+?)\s*$', re.MULTILINE)
# Where torch's own engines live; the rest of torch only leads from one frame of the engine or the model to the next.
_ENGINES_OF_TORCH = ("torch/distributed/", "torch/nn/parallel/")
_LIBRARIES = re.compile(r"^/.*/lib/python3[^/]*/(?!site-packages/)")


def frames_of(text: str) -> tuple[str, ...]:
    """Give the frames of a stack as ``file.py:line in function``, the innermost first.

    A traceback has them the other way round, and may tell of several errors, the last one last: that one counts.
    """
    return tuple(map(_spell, _innermost_first(text)))


def own_frames(text: str) -> tuple[str, ...]:
    """Give the frames that are the engine's or the model's, innermost first; none where there are none."""
    return tuple(_spell(match) for match in _innermost_first(text) if _is_own(match["file"]))


def is_in_passage(text: str) -> bool:
    """Whether the innermost frame of a stack lies on the way of a call to the backend, or in the harness."""
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
