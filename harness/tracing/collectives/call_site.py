"""Where in the engine a collective or operator was called: the nearest frame that does not just pass the call on."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath
from types import CodeType, FrameType

# As imports spell it, with symlinks unresolved, because frames use that path.
_OURS = Path(__file__).parents[2]
_PREFIX = "shardproof/"

# Files through which a call passes on its way to the backend, and files through which autograd calls hooks.
_PASSAGE = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_functional_collectives",
    "torch/distributed/nn/functional.py",
    "torch/_ops.py",
    "torch/_tensor.py",
    "torch/_compile.py",
    "torch/_dynamo/",
    "torch/_library/",
    "torch/library.py",
    "torch/autograd/",
    "torch/futures/",
    "torch/utils/_contextlib.py",
    "torch/utils/_python_dispatch.py",
    "torch/utils/_device.py",
)
# The package and the clone that contains it: tests and suites are imported from there.
_ROOTS = (_OURS.parent, _OURS.resolve().parent)
_PASSAGE_OF_OURS = tuple(str(_OURS / part) for part in ("tracing", "worlds", "training/watches"))
_OF_PYTHON = ("contextlib.py", "threading.py", "typing_extensions.py")
_NOWHERE = "outside Python"


def call_site(below: int = 1) -> str:
    """Name the caller as ``file.py:line in function``; cheap enough for every collective.

    ``below`` counts the innermost frames that cannot be the caller, this one included.
    """
    frame: FrameType | None = sys._getframe(below)
    while frame is not None:
        _, place = _places.get(id(frame.f_code)) or _look_at(frame.f_code)
        if place is not None:
            return f"{place[0]}:{frame.f_lineno} in {place[1]}"
        frame = frame.f_back
    return _NOWHERE


def is_internal_frame(file: str) -> bool:
    """Return whether calls only pass through a file on their way from the engine to the backend."""
    return short_path(file).startswith((*_PASSAGE, *_OF_PYTHON)) or file.startswith(_PASSAGE_OF_OURS)


# Keyed by id, because a code object computes its hash anew each time. The entry keeps the code object alive, so that
# its id is not reused.
_places: dict[int, tuple[CodeType, tuple[str, str] | None]] = {}


def _look_at(code: CodeType) -> tuple[CodeType, tuple[str, str] | None]:
    """Find a code object's file and function; None for code that calls pass through."""
    file = code.co_filename
    found = _places[id(code)] = (code, None if is_internal_frame(file) else (short_path(file), code.co_name))
    return found


def short_path(file: str) -> str:
    """Return a path that is the same on every machine: relative to the package, else to the project, else the name."""
    path = PurePath(file)
    parts = path.parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :]).removeprefix(_PREFIX)
    if "torch" in parts:  # an editable or source build
        return "/".join(parts[parts.index("torch") :])
    for root in _ROOTS:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name
