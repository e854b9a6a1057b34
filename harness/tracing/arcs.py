"""Which code of the engine a rank ran: jumps from line to line within a function, as coverage tools count arcs.

Code is the engine's where it is neither Python's, nor that of torch's core, nor that of the harness and its programs:
the adapter, the packages that it calls, and those of torch for distributed training.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from shardproof.harness.tracing.collectives.call_site import short_path

__all__ = ["Arc", "read_arcs", "tracing_arcs", "write_arcs"]

Arc = tuple[str, int, int]  # of a file, from a line to a line; functions are entered from their first

_OF_TORCH = ("torch/distributed/", "torch/nn/parallel/")
_NOT_THE_ENGINE = ("torch/", "harness/", "fixtures/", "suites/", "reports/", "<")
_PYTHON = sysconfig.get_path("stdlib")
_Tracer = Callable[[FrameType, str, Any], Any]


@contextmanager
def tracing_arcs() -> Iterator[set[Arc]]:
    """Yield the arcs that this thread runs until exit, as they come; none where something else traces the thread."""
    found = set[Arc]()
    if sys.gettrace() is not None:
        yield found
        return
    sys.settrace(_tracer_into(found))
    try:
        yield found
    finally:
        sys.settrace(None)


def _tracer_into(found: set[Arc]) -> _Tracer:
    counted: dict[str, bool] = {}  # by file: a rank enters hundreds of thousands of functions

    def on_call(frame: FrameType, event: str, argument: Any) -> _Tracer | None:
        code = frame.f_code
        file = code.co_filename
        if file not in counted:
            counted[file] = is_of_engine(file)
        return _lines_of(file, code.co_firstlineno, found) if counted[file] else None

    return on_call


def _lines_of(file: str, first: int, found: set[Arc]) -> _Tracer:
    """Return what records the lines of one call of a function."""
    before = first

    def on_line(frame: FrameType, event: str, argument: Any) -> _Tracer:
        nonlocal before
        if event == "line":
            line = frame.f_lineno
            found.add((file, before, line))
            before = line
        return on_line

    return on_line


def is_of_engine(file: str) -> bool:
    """Return whether a file's code is what an engine is made of."""
    short = short_path(file)
    if short.startswith(_OF_TORCH):
        return True
    of_python = file.startswith(_PYTHON) and "site-packages" not in file
    return not of_python and not short.startswith(_NOT_THE_ENGINE)


def write_arcs(arcs: Iterable[Arc], path: Path) -> None:
    """Write them in order."""
    path.write_text(json.dumps(sorted((short_path(file), *lines) for file, *lines in arcs)))


def read_arcs(path: Path) -> set[Arc]:
    """Read what `write_arcs` wrote."""
    return {(file, before, line) for file, before, line in json.loads(path.read_text())}
