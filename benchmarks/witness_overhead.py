"""What witnesses cost: a training step of one engine with none, with the ledger, and with races watched, in turn.

Run: ``python -m benchmarks.witness_overhead [--turns 20] [--world 2]``. Each rank is a process, so that a step with no
witness has none at all. Ratios are of one turn each, and their quartiles are told beside the median.
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
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from engine.contract import Layout, Plan, PreparedModel
from engine.registry import resolve
from harness.door.kernels import Door, standing_in_c10d
from harness.ledger.recorder import Recorder
from harness.races.accesses import AccessMode
from harness.races.streams import tracked_streams
from harness.races.watch import RaceWatch, current_watch, set_watch
from harness.worlds.threads_backend import global_ranks

ENGINES = ("reference", "torch.fsdp2")
NUM_LAYERS = 6
SIZES = {"small": (64, 16), "large": (1024, 128)}  # width and rows
NUM_STEPS = 3  # in each turn, of which the median counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Contender:
    """A model that is only ever touched under its own witness."""

    witness: Callable[[], AbstractContextManager[object]]
    prepared: PreparedModel


def _rank(rank: int, folder: str, size: int, num_turns: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    rows = []
    for engine in ENGINES:
        for name, (width, num_rows) in SIZES.items():
            contenders = _contenders(engine, width, Path(folder) / f"{rank}.{engine}.{name}")
            taken = _measure(contenders, torch.randn(num_rows, width), num_turns)
            rows.append([engine, name, *_columns(taken)])
    if rank == 0:
        headers = ["engine", "model", "none ms", "ledger ms", "races ms", "ledger", "races"]
        print(tabulate(rows, headers=headers))
    dist.destroy_process_group()


def _contenders(engine: str, width: int, journal: Path) -> dict[str, _Contender]:
    recorder = Recorder(journal)
    watch = RaceWatch(recorder)
    door = Door(recorder=lambda: recorder, ranks_of=global_ranks, listener=current_watch)

    @contextmanager
    def ledger() -> Iterator[None]:
        with standing_in_c10d(door):
            yield

    @contextmanager
    def races() -> Iterator[None]:
        with standing_in_c10d(door), tracked_streams():
            set_watch(watch)
            try:
                with AccessMode(watch):
                    yield
            finally:
                set_watch(None)

    found = {}
    for name, witness in {"none": nullcontext, "ledger": ledger, "races": races}.items():
        with witness():
            found[name] = _Contender(witness=witness, prepared=_prepared(engine, width))
    return found


def _prepared(engine: str, width: int) -> PreparedModel:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(NUM_LAYERS)))
    plan = Plan(layout=Layout.SHARD, units=tuple(map(str, range(NUM_LAYERS))))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    prepared = resolve(engine).prepare(model, plan, mesh)
    prepared.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=1e-6))
    return prepared


def _measure(contenders: dict[str, _Contender], rows: torch.Tensor, num_turns: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(num_turns + 1):
        first = turn % len(names)  # nobody is always first
        for name in names[first:] + names[:first]:
            contender = contenders[name]
            with contender.witness():
                _step(contender.prepared, rows)  # fills what entering the witness emptied, once per case
                seconds = median(_step(contender.prepared, rows) for _ in range(NUM_STEPS))
            if turn:  # the first turn builds buffers and optimizer state
                taken[name].append(seconds)
    return taken


def _step(prepared: PreparedModel, rows: torch.Tensor) -> float:
    dist.barrier()  # so that a step is not charged for its peer's previous one
    started = time.perf_counter()
    prepared.backward(prepared(rows).sum())
    prepared.step()
    prepared.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def _columns(taken: dict[str, list[float]]) -> Iterator[str]:
    yield from (f"{median(seconds) * 1e3:.2f}" for seconds in taken.values())
    for name in ("ledger", "races"):
        # Turn by turn, so that a change of the machine's speed meets all alike.
        low, middle, high = quantiles(map(truediv, taken[name], taken["none"]), n=4)
        yield f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def main() -> None:
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--world", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, arguments.world, arguments.turns))
            for rank in range(arguments.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed; see above")


if __name__ == "__main__":
    main()
