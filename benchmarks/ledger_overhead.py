"""What watching costs: a training step plain, under our ledger, with unit events too, and under CommDebugMode, in turn.

Times are those of the processor.

Run: ``python -m benchmarks.ledger_overhead [--turns 60]``
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import truediv
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks.watch_work import WORK
from shardproof.harness.torch_compat.process_groups import FileStore
from shardproof.harness.tracing.collectives.interception import Interceptor, standing_in_c10d
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.tracing.unit_hooks import watching_units
from shardproof.harness.worlds.threads.process_group import global_ranks

WORLD_SIZE = 2
Watch = Callable[[], AbstractContextManager[object]]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
    dist.barrier()  # so that a step does not include its peer's previous one
    started = time.process_time()  # of gloo's threads too, and not of other programs
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - started


def _rank(rank: int, folder: str, num_turns: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    rows = []
    for name, (build, width) in WORK.items():
        taken = _measure(build(width), width, num_turns, Path(folder) / f"{rank}.{name}".replace(" ", "-"))
        # Turn by turn, so that a change of the machine's speed affects all three alike.
        ratios = [median(map(truediv, taken[w], taken["plain"])) for w in taken]
        rows.append([name, *(f"{median(taken[w]) * 1e3:.2f}" for w in taken), *(f"{r:.2f}x" for r in ratios)])
    if rank == 0:
        watches = ["plain", "ledger", "events", "CommDebugMode"]
        print(tabulate(rows, headers=["step", *(f"{w} ms" for w in watches), *watches]))
    dist.destroy_process_group()


def _measure(model: nn.Module, width: int, num_turns: int, journal: Path) -> dict[str, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    recorder = Recorder(journal)
    interceptor = Interceptor(recorder=lambda: recorder, ranks_of=global_ranks)
    watches: dict[str, Watch] = {
        "plain": nullcontext,
        "ledger": lambda: standing_in_c10d(interceptor),
        "events": lambda: _with_events(interceptor, model, recorder),
        "CommDebugMode": CommDebugMode,
    }
    rows = torch.randn(16, width)
    taken: dict[str, list[float]] = {name: [] for name in watches}
    for turn in range(num_turns + 2):
        names = list(watches)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # none is always first
            seconds = _watched(watches[name], lambda: _step(model, optimizer, rows))
            if turn >= 2:  # the first turns build buckets, buffers and optimizer state
                taken[name].append(seconds)
    return taken


@contextmanager
def _with_events(interceptor: Interceptor, model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Watch each layer as a unit, and the phases of a loop, as a case does."""
    units = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    with (
        standing_in_c10d(interceptor),
        watching_units(model, units, recorder),
        recorder.during(Phase.STEP, step=0),
    ):
        yield


def _watched(watch: Watch, step: Callable[[], float]) -> float:
    """Time steps as a user of the watch would: CommDebugMode must be entered again for every step."""
    if watch is CommDebugMode:
        taken = []
        for _ in range(3):
            with watch():  # type: ignore[no-untyped-call]  # torch leaves it untyped
                taken.append(step())
        return median(taken)
    with watch():
        step()  # the first step under an interceptor fills the dispatcher's caches, once per case
        return median(step() for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, arguments.turns)) for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed; see above")


if __name__ == "__main__":
    main()
