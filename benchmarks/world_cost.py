"""What a case costs: our worlds beside torch's MultiProcessTestCase doing the same work in the same run.

Needs ``pip install -e '.[bench]'``. Run: ``python -m benchmarks.world_cost [--sizes 2 4 8] [--repeats 5]``
"""

from __future__ import annotations

import argparse
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch.distributed as dist
from tabulate import tabulate
from torch.testing._internal.common_distributed import MultiProcessTestCase

from benchmarks.world_work import body, train_two_steps
from shardproof.harness.torch_compat.process_groups import FileStore
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.spec import WorldKind, WorldSpec


class UpstreamCase(MultiProcessTestCase):
    """The same work as a case of torch's own multi-process test class."""

    size = 2

    @property
    def world_size(self) -> int:
        return self.size

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_case(self) -> None:
        store = FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        train_two_steps()
        dist.destroy_process_group()


class Upstream2(UpstreamCase):
    """Two ranks; a class per size, because the spawned process knows only the class."""


class Upstream4(UpstreamCase):
    """Four ranks."""

    size = 4


class Upstream8(UpstreamCase):
    """Eight ranks."""

    size = 8


UPSTREAM: dict[int, type[UpstreamCase]] = {2: Upstream2, 4: Upstream4, 8: Upstream8}


def _shardproof_world(kind: WorldKind, size: int) -> Callable[[], None]:
    def once() -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = launch(WorldSpec(kind=kind, size=size), body, folder=Path(folder))
        if not result.is_clean:
            raise RuntimeError(f"the case failed: {result}")

    return once


def _torch_spawn(size: int) -> Callable[[], None]:
    def once() -> None:
        result = unittest.TestResult()
        UPSTREAM[size]("test_case").run(result)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if result.testsRun != 1 or not result.wasSuccessful() or result.skipped:
            raise RuntimeError(f"the case failed: {result.failures} {result.errors} {result.skipped}")

    return once


def _seconds(once: Callable[[], None]) -> float:
    started = time.perf_counter()
    once()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], choices=sorted(UPSTREAM))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for size in arguments.sizes:
        threads, processes, spawned = (
            _shardproof_world(WorldKind.THREADS, size),
            _shardproof_world(WorldKind.PROCESSES, size),
            _torch_spawn(size),
        )
        threads(), processes()  # the fork server starts once per session, not once per case
        # In turn, so that a change of the machine's speed affects all three alike.
        taken = [tuple(map(_seconds, (threads, processes, spawned))) for _ in range(arguments.repeats)]
        t, p, u = (median(column) for column in zip(*taken, strict=True))
        rows.append([size, f"{t:.3f}", f"{p:.3f}", f"{u:.2f}", f"{u / t:.0f}x", f"{u / p:.0f}x"])
    headers = ["ranks", "threads s", "processes s", "MultiProcessTestCase s", "threads", "processes"]
    print(tabulate(rows, headers=headers))


if __name__ == "__main__":
    main()
