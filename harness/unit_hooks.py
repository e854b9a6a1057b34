"""Telling the recorder which unit's forward or backward is under way, by public hooks that change nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from harness.ledger.recorder import Recorder

__all__ = ["watching_units"]


@contextmanager
def watching_units(model: nn.Module, units: tuple[str, ...], recorder: Recorder) -> Iterator[None]:
    """Hook the named submodules, and the root as ``""``, for the duration.

    Our hooks are put first: an engine that gathers a unit in hooks of its own does so inside the unit. Units
    that the engine renamed away are left out; their traffic is attributed to the unit around them.
    """
    handles = []
    known = dict(model.named_modules())
    outputs = _LatestOutput()
    for unit in ("", *(name for joint in units for name in joint.split(","))):
        if (module := known.get(unit)) is not None:
            handles.append(module.register_forward_pre_hook(_Enter(unit, recorder), prepend=True))
            handles.append(module.register_forward_hook(_Leave(unit, recorder, outputs), prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Enter:
    def __init__(self, unit: str, recorder: Recorder) -> None:
        self._unit = unit
        self._recorder = recorder

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._recorder.enter_unit(self._unit)


class _LatestOutput:
    """The tensor that a unit returned last: where a unit's output is also that of the unit around it, the
    inner one is what backward reaches."""

    def __init__(self) -> None:
        self._tensor: weakref.ref[torch.Tensor] | None = None

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Tell whether no unit has just returned this tensor, and remember it."""
        known = self._tensor is not None and self._tensor() is tensor
        self._tensor = weakref.ref(tensor)
        return not known


class _Leave:
    """Ends the unit's forward, and has its outputs' gradients announce the unit's backward."""

    def __init__(self, unit: str, recorder: Recorder, outputs: _LatestOutput) -> None:
        self._unit = unit
        self._recorder = recorder
        self._outputs = outputs

    # Any: a module takes and returns what it likes.
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._recorder.leave_unit(self._unit)
        for tensor in _tensors_in(output):
            if tensor.requires_grad and self._outputs.is_new(tensor):
                tensor.register_hook(self._arrive)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _arrive(self, gradient: torch.Tensor) -> None:
        self._recorder.turn_to_unit(self._unit)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors_in(part)
