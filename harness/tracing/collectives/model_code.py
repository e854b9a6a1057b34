"""Tells the collectives that a user's model or loss issues from those of the engine, by the frames of the call.

[Note: who communicates] Both call the same functions of torch below one another: an engine wraps forward, and runs in
hooks of modules inside it. The model's own calls are those that lead to one of its forwards, or to its loss, before
they lead to torch's code that calls modules and hooks; and in backward those of autograd functions in its files.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

from shardproof.harness.tracing.collectives.call_site import is_internal_frame

_TORCH = str(Path(torch.__file__).parent)
_DIFFERENTIABLE = f"{_TORCH}/distributed/nn/functional.py"
_CALLS_MODULES = f"{_TORCH}/nn/modules/module.py"
_CALLS_FUNCTIONS = f"{_TORCH}/autograd/function.py"
_ENGINES = (f"{_TORCH}/distributed/", f"{_TORCH}/nn/parallel/", str(Path(__file__).parents[3] / "engine"))


class ModelCode:
    """The code of a user's model: its forwards, its loss, and the files through which they communicated so far."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., object], engine_files: Iterable[str | None]
    ) -> None:
        codes = [_code(module.forward) for module in model.modules()]
        # By id, because a code object computes its hash anew each time.
        self._forwards = {id(code): code for code in codes if code is not None}
        self._loss = _code(loss)
        own = {code.co_filename for code in (*self._forwards.values(), self._loss) if code is not None}
        self._files = {file for file in own if not file.startswith(_TORCH)}
        self._engines = {file for file in engine_files if file is not None} - self._files

    def is_calling(self) -> bool:
        """Return whether the model's code, not the engine's, makes the collective that is issued now."""
        passed: list[CodeType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            if file == _DIFFERENTIABLE:
                return True
            if id(code) in self._forwards or code is self._loss:
                self._files.update(each.co_filename for each in passed)
                return True
            if file == _CALLS_MODULES:
                return self._is_in_loss(frame)
            if file == _CALLS_FUNCTIONS and passed and passed[-1].co_name == "backward":
                return passed[-1].co_filename in self._files
            if not is_internal_frame(file):
                if file in self._engines or file.startswith(_ENGINES):
                    return False
                passed.append(code)
            frame = frame.f_back
        return False

    def _is_in_loss(self, frame: FrameType | None) -> bool:
        """Return whether the loss called the module whose call this is: no engine wraps such a one."""
        while frame is not None:
            if frame.f_code is self._loss:
                return True
            frame = frame.f_back
        return False


# Any callable, such as a method.
def _code(function: Callable[..., object]) -> CodeType | None:
    code: object = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None
