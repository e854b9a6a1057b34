"""The calls by which an engine wraps a model, as it makes them: what is judged is then what the record says.

[Note: calls seen from outside] A profile function, which Python calls at each call of this thread, sees the public
functions of data-parallel engines by name, with the values of their arguments. So the calls of adapters, third-party
packages and users' own functions are seen alike, and nothing of torch is replaced.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn

_NAMES = re.compile(
    r"(?P<name>DistributedDataParallel|FullyShardedDataParallel|\w*DDP|fully_shard|replicate)(\.__init__)?"
    r"|FSDPModule\.(?P<method>set_\w+)"
)
_OF_THE_WORLD = {
    "self",
    "module",
    "modules",
    "mesh",
    "device_mesh",
    "process_group",
    "device_ids",
    "device_id",
}
_MOST_NAMES, _MOST_CALLS = 3, 8


class WrapperCalls:
    """The calls of one preparation; equal calls on several modules are one."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._calls = dict[tuple[str, tuple[str, ...]], list[str]]()
        self._depth = 0

    def __str__(self) -> str:
        shown = [
            _spelled(name, ", ".join(options), modules) for (name, options), modules in self._calls.items()
        ]
        more = [f"{len(shown) - _MOST_CALLS} more calls"] if len(shown) > _MOST_CALLS else []
        return "; ".join([*shown[:_MOST_CALLS], *more])

    def options_of(self, function: str) -> frozenset[str]:
        """Return the options of all calls of a function, as ``name=value``; what has its default value is none."""
        return frozenset(option for name, options in self._calls if name == function for option in options)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, unless something else does."""
        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    # Any: what a profile function is called with.
    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        found = _NAMES.fullmatch(frame.f_code.co_qualname) if event in {"call", "return"} else None
        if found is None:
            return
        self._depth += 1 if event == "call" else -1
        if event == "return" or self._depth > 1:  # one of an engine's own calls inside the first
            return
        name = found["name"] or found["method"]
        self._note(name, frame)

    def _note(self, name: str, frame: FrameType) -> None:
        given = _arguments(frame)
        modules = next((given[key] for key in ("module", "modules", "self") if key in given), None)
        modules = list(modules) if isinstance(modules, list | tuple) else [modules]
        shown = [self._names[id(module)] or "the model" for module in modules if id(module) in self._names]
        defaults = _defaults(frame)
        options = tuple(
            f"{key}={_shown(value)}"
            for key, value in given.items()
            if key not in _OF_THE_WORLD and not _is_default(value, defaults.get(key))
        )
        self._calls.setdefault((name, options), []).extend(shown)


def _spelled(name: str, options: str, modules: list[str]) -> str:
    """Return a call as Python spells it; of calls on several modules, the call on each."""
    names = list(dict.fromkeys(modules))
    first = "model" if names == ["the model"] else "module"
    call = f"{name}({', '.join(filter(None, (first, options)))})"
    if first == "model" or not names:
        return call
    rest = len(names) - _MOST_NAMES
    listed = names if rest <= 0 else [*names[: _MOST_NAMES - 1], f"{rest} more", names[-1]]
    return f"{call} of {', '.join(listed[:-1])}{' and ' if listed[1:] else ''}{listed[-1]}"


# Any, below: arguments of any engine's functions.
def _arguments(frame: FrameType) -> dict[str, Any]:
    code = frame.f_code
    number = code.co_argcount + code.co_kwonlyargcount
    named = {name: frame.f_locals[name] for name in code.co_varnames[:number] if name in frame.f_locals}
    has_more = code.co_flags & inspect.CO_VARKEYWORDS
    index = number + bool(code.co_flags & inspect.CO_VARARGS)
    return named | (dict(frame.f_locals.get(code.co_varnames[index], {})) if has_more else {})


def _defaults(frame: FrameType) -> dict[str, Any]:
    owner, _, method = frame.f_code.co_qualname.rpartition(".")
    found: Any = frame.f_globals.get(owner or method)
    function: Callable[..., object] | None = getattr(found, method, None) if owner else found
    if function is None:
        return {}
    signature = inspect.signature(inspect.unwrap(function))
    return {name: parameter.default for name, parameter in signature.parameters.items()}


def _is_default(value: Any, default: Any) -> bool:
    if value is None or isinstance(value, torch.Tensor):
        return True
    try:
        if default is None and not isinstance(value, bool | int | float):  # None stands for an empty one
            return not value or bool(value == type(value)())
        return bool(value == default)
    except Exception:  # values of any engine, which may refuse to be made or compared
        return False


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__name__", type(value).__name__)
    text = " ".join(repr(value).split())[:200]
    return f"{type(value).__name__}(...)" if " at 0x" in text else text  # an address says nothing
