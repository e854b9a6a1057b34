"""Engines that cannot be judged, each for another reason; named by path in tests."""

from __future__ import annotations

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine


class TakesArguments(DistributedDataParallelEngine):
    """Cannot be constructed without an argument."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes


class HasNoVersion(DistributedDataParallelEngine):
    """Returns None as its version."""

    def version(self) -> str:
        return None  # type: ignore[return-value]  # the fault


class FailsToSayItsVersion(DistributedDataParallelEngine):
    """Raises when asked for its version."""

    def version(self) -> str:
        raise RuntimeError("no such file:\nVERSION")


class EndsTheProcess(DistributedDataParallelEngine):
    """Ends the process when asked for its version."""

    def version(self) -> str:
        import os

        os._exit(7)


class HangsInItsVersion(DistributedDataParallelEngine):
    """Never answers."""

    def version(self) -> str:
        import threading

        threading.Event().wait()
        return super().version()


class DeclaresNothing(DistributedDataParallelEngine):
    """Declares None as its capabilities."""

    capabilities = None  # type: ignore[assignment]  # the fault


class DeclaresNonsense(DistributedDataParallelEngine):
    """Declares a value that is no capability."""

    capabilities = frozenset({"fast"})  # type: ignore[arg-type]  # the fault
