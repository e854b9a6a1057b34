"""Engines that raise what is hard to report; rank 1 does so in the second forward. Named by path in test_causes.py."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel

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
    """Raises when somebody asks for its cause, or for notes."""

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

    def error(self) -> BaseException:
        """Make the error."""
        return RuntimeError("a plain one")

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Add a hook to the module that DDP calls."""
        prepared = super().prepare(model, plan, mesh)
        calls: list[int] = []

        # Any: a hook is called with what the module is.
        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2 and dist.get_rank() == CULPRIT:
                raise self.error()

        model.register_forward_pre_hook(fail)
        return prepared


class UnsupportedWordlessError(ValueError):
    """Says no, and raises when it is printed."""

    def __str__(self) -> str:
        raise ValueError("no text")


class RefusesWithoutWords(DistributedDataParallelEngine):
    """Refuses by an error that cannot be printed."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Refuse."""
        raise UnsupportedWordlessError


class RefusesAtLength(DistributedDataParallelEngine):
    """Refuses by 50 MB of text."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Refuse."""
        raise NotImplementedError(50 * MEGABYTE * "no ")


class RaisesWordless(Raises):
    """Raises an error that raises when it is printed."""

    def error(self) -> BaseException:
        return WordlessError()


class RaisesTextless(Raises):
    """Raises an error whose text is a number."""

    def error(self) -> BaseException:
        return TextlessError()


class RaisesSlow(Raises):
    """Raises an error whose text takes time."""

    def error(self) -> BaseException:
        return SlowError()


class RaisesEnding(Raises):
    """Raises an error that ends the process when it is printed."""

    def error(self) -> BaseException:
        return EndingError()


class RaisesUncaused(Raises):
    """Raises an error without a readable cause."""

    def error(self) -> BaseException:
        return UncausedError("a text")


class RaisesNameless(Raises):
    """Raises an error of a type without a readable name."""

    def error(self) -> BaseException:
        return NamelessError("a text")


class RaisesMuch(Raises):
    """Raises an error with 50 MB of text."""

    def error(self) -> BaseException:
        return RuntimeError("begins here " + 50 * MEGABYTE * "x" + " ends here")


class RaisesManyLines(Raises):
    """Raises an error whose text is 20 million lines."""

    def error(self) -> BaseException:
        return RuntimeError("begins here" + 20 * MEGABYTE * "\n" + "ends here")


class RaisesOddCharacters(Raises):
    """Raises an error with a lone surrogate, a NUL and a terminal's escapes."""

    def error(self) -> BaseException:
        return RuntimeError("half \ud800 nothing \0 red \x1b[31m line\r over")


class QuotesATimeout(Raises):
    """Raises an error of its own that speaks of a timeout."""

    def error(self) -> BaseException:
        return RuntimeError("lease on the checkpoint server timed out")


class QuotesAPeer(Raises):
    """Raises an error of its own in the words of gloo."""

    def error(self) -> BaseException:
        return RuntimeError("Connection closed by peer [10.0.0.1]:4711")


class QuotesADistError(Raises):
    """Raises an error of torch.distributed's own type."""

    def error(self) -> BaseException:
        return dist.DistNetworkError("the tracker's socket closed")


class QuotesAConnection(Raises):
    """Raises what Python raises of sockets."""

    def error(self) -> BaseException:
        return ConnectionResetError("connection reset by the metrics server")


class QuotesAMismatch(Raises):
    """Raises an error with the name of one of ours."""

    def error(self) -> BaseException:
        return CollectiveMismatchError("CollectiveMismatchError: all_reduce of 4 bytes")


class QuotesADeadlock(Raises):
    """Raises one of ours."""

    def error(self) -> BaseException:
        from shardproof.harness.worlds.threads.collective_errors import DeadlockError

        return DeadlockError("my queue", expected="a job", got="none", hint="another")
