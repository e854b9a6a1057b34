"""Converts an exception to the outcome `Raised`. An exception is an engine's code: printing it may fail in any way.

[Note: whose error] The text of an error alone does not show whether another rank's failure caused it: an engine may
quote the texts of torch or the harness. So the origin decides first. An error that the engine's own code raised by a
``raise`` statement is the engine's, unless it was raised while such a consequence was handled. Torch raises plain
RuntimeErrors for lost peers, from C++: for these only the text is available.
"""

from __future__ import annotations

import dis
import os
import re
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch

from shardproof.harness.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    WorldAbandonedError,
)
from shardproof.harness.tracing.collectives.call_site import short_path
from shardproof.harness.worlds.outcome import Raised
from shardproof.harness.worlds.printable import legible, shortened

# The beginning of a note that names the call of the harness to the engine in which an error was raised.
IN = "in PreparedModel."
# Characters of a message, which appears in headlines, and of a traceback.
_LONGEST_MESSAGE = 4_000
_LONGEST_TRACEBACK = 40_000
_LONGEST_NAME = 200
_LONGEST_CHAIN = 16  # of causes

# The messages of gloo, nccl and the store for a peer that is gone or late.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out|timeout|socket closed|remote process exited",
    re.IGNORECASE,
)
_T = TypeVar("_T")
_RAISE = dis.opmap["RAISE_VARARGS"]
_HARNESS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
# Independent of attributes that an engine's class may define instead.
_traceback_of = vars(BaseException)["__traceback__"].__get__
_cause_of = vars(BaseException)["__cause__"].__get__
_context_of = vars(BaseException)["__context__"].__get__
_name_of = vars(type)["__name__"].__get__


def raised(rank: int, error: BaseException, message: str = "") -> Raised:
    """Return the outcome of a rank that raised; ``message`` replaces the error's own. Never raises."""
    return Raised(
        rank=rank,
        kind=kind_of(error),
        message=legible(message or _message(error), 2 * _LONGEST_MESSAGE),
        traceback=legible(_attempt(lambda: _trace(error)) or _frames(error), _LONGEST_TRACEBACK),
        is_symptom=_is_symptom(error),
        at_s=time.monotonic(),
    )


def kind_of(error: BaseException) -> str:
    """Return the name of an error's type, with its module if an error of the transport has the same name."""
    kind = type(error)
    name = legible(str.__str__(_name_of(kind)), _LONGEST_NAME)
    if name in _names_of_ours(CollectiveError) and not _is_ours(error):
        module = _attempt(lambda: str.__str__(vars(kind)["__module__"])) or "another module"
        return f"{legible(module, _LONGEST_NAME)}.{name}"
    return name


def text_of(error: BaseException) -> str:
    """Return an error's text, shortened; if it cannot be read, the reason instead."""
    text = _text(error)
    if text is None:
        return "(its message cannot be shown)"
    return legible(text, _LONGEST_MESSAGE) if text.strip() else "(no message)"


def is_abandonment(error: BaseException) -> bool:
    """Return whether an error is the one by which the harness stops a rank, and not raised by an engine."""
    return isinstance(error, WorldAbandonedError) and not _is_engines_own(error)


def _text(error: BaseException) -> str | None:
    _attempt(lambda: _spell_freed(error))
    return _attempt(lambda: str.__str__(str(error)))


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the rank called sys.exit({_attempt(lambda: repr(error.code)) or '...'})"
    if _name_of(type(error)) in {"Skipped", "SkipTest"}:
        return f"the rank skipped ({text_of(error)}); a rank may not skip"
    text, origin = _text(error), _origin(error)
    parts = [text_of(error)]
    if not (text and text.strip()) and origin is not None:
        code = origin.tb_frame.f_code
        parts.append(f"at {short_path(code.co_filename)}:{origin.tb_lineno} in {code.co_name}")
    return ", ".join([*parts, *_calls(error)])


def _calls(error: BaseException) -> list[str]:
    """List the notes by which the harness marked the call to the engine in which an error was raised."""
    notes: list[str] = []

    def collect() -> str:
        notes.extend(note for note in error.__notes__ if type(note) is str and note.startswith(IN))
        return ""

    _attempt(collect)
    return [legible(note, _LONGEST_NAME) for note in notes[:1]]


def _spell_freed(error: BaseException) -> None:
    """Describe tensors among an error's arguments, and those of its causes, whose memory is freed.

    Their own text would read that memory, which ends the process (seen with torch 2.13 to 2.15). The KeyError of a dict
    of parameters has such an argument.
    """
    pending, seen = [error], set[int]()
    while pending and len(seen) < _LONGEST_CHAIN:
        found = pending.pop()
        seen.add(id(found))
        given = vars(BaseException)["args"].__get__(found)
        if any(_is_freed(value) for value in given):
            spelt = (
                f"a tensor of shape {list(v.shape)} without memory" if _is_freed(v) else v for v in given
            )
            vars(BaseException)["args"].__set__(found, tuple(spelt))
        chain = (_cause_of(found), _context_of(found))
        pending += [more for more in chain if more is not None and id(more) not in seen]


def _is_freed(value: object) -> bool:
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or value.device.type == "meta"
    ):
        return False
    local = getattr(value, "_local_tensor", value)
    return local.untyped_storage().nbytes() < local.element_size() * local.numel()


def _attempt(call: Callable[[], _T]) -> _T | None:
    """Return the result of an engine's code, None if it raises anything: even SystemExit counts as a failure."""
    try:
        return call()
    except BaseException:
        return None


def _trace(error: BaseException) -> str:
    """Format a traceback with its causes, each with a message of bounded length."""
    whole = traceback.TracebackException.from_exception(error)
    pending, num_seen = [whole], 0
    while pending and num_seen < _LONGEST_CHAIN:
        found = pending.pop()
        num_seen += 1
        # Private, and so optional: without it a long message makes formatting slow.
        if isinstance(text := getattr(found, "_str", None), str):
            found._str = shortened(text, _LONGEST_MESSAGE)  # type: ignore[attr-defined]  # as above
        pending += [more for more in (found.__cause__, found.__context__) if more is not None]
    return "".join(whole.format())


def _frames(error: BaseException) -> str:
    """Format a traceback without calling methods of the error."""
    lines = traceback.format_tb(_traceback_of(error))
    return "".join(["Traceback (most recent call last):\n", *lines, f"{kind_of(error)}\n"])


def _is_symptom(error: BaseException, depth: int = 0) -> bool:
    """Return whether the failure of another rank caused an error; see [Note: whose error]."""
    if _is_ours(error):
        return isinstance(error, CollectiveTimeoutError)
    if not isinstance(error, RuntimeError | ConnectionError) or depth > _LONGEST_CHAIN:
        return False
    if _PEER_IS_GONE.search(text_of(error)) is None:
        return False
    if isinstance(error, ConnectionError) and not _is_of_library(error):
        return False  # torch.distributed has types of its own
    return not _is_engines_own(error) or any(
        _is_symptom(cause, depth + 1) for cause in (_cause_of(error), _context_of(error)) if cause is not None
    )


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, CollectiveError) and not _is_engines_own(error)


def _is_engines_own(error: BaseException) -> bool:
    """Return whether a ``raise`` statement made the error, in code of neither torch nor the harness."""
    origin = _origin(error)
    if origin is None:
        return False
    is_by_hand = origin.tb_frame.f_code.co_code[origin.tb_lasti] == _RAISE
    return is_by_hand and not _is_of_library(error)


def _is_of_library(error: BaseException) -> bool:
    """Return whether the innermost frame is torch's or the harness's."""
    origin = _origin(error)
    return origin is not None and origin.tb_frame.f_code.co_filename.startswith((_HARNESS, _TORCH))


def _origin(error: BaseException) -> TracebackType | None:
    """Return the innermost entry of an error's traceback."""
    found: TracebackType | None = _traceback_of(error)
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    return found


def _names_of_ours(kind: type) -> set[str]:
    subclasses: list[type] = kind.__subclasses__()
    return {found.__name__ for found in subclasses if found.__module__ == kind.__module__}
