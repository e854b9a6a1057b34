"""Engines whose errors are hard to report; rank 1 raises in the second forward. Named by path in test_causes.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.harness.errors import DeadlockError

CULPRIT = 1
MEGABYTE = 10**6


class WordlessError(Exception):
    """Raises when it is printed, in every way of printing."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class TextlessError(Exception):
    """Returns a number as its text."""

    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # the fault


class SlowError(Exception):
    """Computes for a while before it has a text."""

    def __str__(self) -> str:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        return "at last"


class EndingError(Exception):
    """Ends the process when it is printed."""

    def __str__(self) -> str:
        raise SystemExit(0)


class UncausedError(Exception):
    """Raises on a read of its cause or of its notes."""

    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]  # a property, which is the fault
        raise ValueError("no cause")

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # the fault
        raise ValueError("no notes")


class _Named(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]  # the fault
        raise ValueError("no name")


class NamelessError(Exception, metaclass=_Named):
    """Has a type whose name cannot be read."""


class CollectiveMismatchError(RuntimeError):
    """Has the name of an error of the threads world."""


class Raises(DistributedDataParallelEngine):
    """Raises `error()` in the second forward of rank 1."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Add a hook to the module that DDP calls."""
        prepared = super().prepare(model, plan, mesh)
        calls: list[int] = []

        # Any: a hook is called with the arguments of the module.
        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2 and dist.get_rank() == CULPRIT:
                raise self.error()

        model.register_forward_pre_hook(fail)
        return prepared


class UnsupportedWordlessError(ValueError):
    """Refuses, and raises when it is printed."""

    def __str__(self) -> str:
        raise ValueError("no text")


class RefusesWithoutWords(DistributedDataParallelEngine):
    """Refuses by an error that cannot be printed."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        raise UnsupportedWordlessError


class RefusesAtLength(DistributedDataParallelEngine):
    """Refuses by 50 MB of text."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        raise NotImplementedError(50 * MEGABYTE * "no ")


# The error of each engine, by name.
ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "RaisesWordless": WordlessError,
    "RaisesTextless": TextlessError,
    "RaisesSlow": SlowError,
    "RaisesEnding": EndingError,
    "RaisesUncaused": lambda: UncausedError("a text"),
    "RaisesNameless": lambda: NamelessError("a text"),
    "RaisesMuch": lambda: RuntimeError("begins here " + 50 * MEGABYTE * "x" + " ends here"),
    "RaisesManyLines": lambda: RuntimeError("begins here" + 20 * MEGABYTE * "\n" + "ends here"),
    "RaisesOddCharacters": lambda: RuntimeError("half \ud800 nothing \0 red \x1b[31m line\r over"),
    "QuotesATimeout": lambda: RuntimeError("lease on the checkpoint server timed out"),
    "QuotesAPeer": lambda: RuntimeError("Connection closed by peer [10.0.0.1]:4711"),
    "QuotesADistError": lambda: dist.DistNetworkError("the tracker's socket closed"),
    "QuotesAConnection": lambda: ConnectionResetError("connection reset by the metrics server"),
    "QuotesAMismatch": lambda: CollectiveMismatchError("CollectiveMismatchError: all_reduce of 4 bytes"),
    "QuotesADeadlock": lambda: DeadlockError("my queue", expected="a job", got="none", hint="another"),
}


def __getattr__(name: str) -> Raises:
    """Make the engine that raises the error of this name."""
    if name in ERRORS:
        return Raises(ERRORS[name])
    raise AttributeError(name)
