"""What a rank costs as its world grows from 2 to 16,384 ranks, and what simulating it costs beside the bare engine.

    python -m benchmarks.scale [--engine NAME ...] [--size N ...]

Bare is the engine under torch's own fake process group, in the same loop without anything of ours. The two run in turn
in one process for each row; times are medians, of the processor.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import isnan
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardproof.engine.contract import Capability, Layout
from shardproof.engine.registry import resolve
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import TRANSFORMER
from shardproof.harness.cases.training import Training
from shardproof.harness.records.observation import Observation, load_observation
from shardproof.harness.records.saved_result import observation_path
from shardproof.harness.torch_compat.process_groups import HashStore
from shardproof.harness.tracing.collectives.interception import standing_in_c10d
from shardproof.harness.tracing.journal import read_journal
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.training.rank_body import drive_rank
from shardproof.harness.worlds.rank import RankContext, journal_path
from shardproof.harness.worlds.simulated import simulating
from shardproof.harness.worlds.threads.process_group import register_threads_backend
from shardproof.suites.training import train

ENGINES = ("torch.fsdp2", "reference", "torch.ddp", "torch.replicate")
SIZES = (2, 64, 1024, 16384)
STEPS, TURNS = 3, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One rank's cost: processor time of preparation and steps, and figures of its ledger and census."""

    seconds: float
    calls: int = 0
    kib_sent: float = 0.0
    kib_held: float = 0.0


def _training(layout: Layout = Layout.NATIVE) -> Training:
    return train(TRANSFORMER, ADAMW, steps=STEPS, layout=layout)


def _in_group(backend: str, size: int, body: Callable[[], None]) -> float:
    """Run a body as the middle rank of a world of this size; returns processor seconds."""
    dist.init_process_group(backend, store=HashStore(), rank=size // 2, world_size=size)
    started = time.process_time()
    try:
        body()
        return time.process_time() - started
    finally:
        dist.destroy_process_group()


def bare(engine: str, size: int) -> Cost:
    """Train without the harness, and without values."""
    training, rank = _training(), size // 2

    def body() -> None:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
        prepared = resolve(engine).prepare(training.problem.build(), training.plan, mesh)
        prepared.optimizer(training.optimizer)
        for step in range(STEPS):
            batch = training.problem.batch(step=step, microbatch=0, rank=rank)
            loss = training.problem.loss_sum(prepared(*batch.inputs), batch)
            prepared.backward(loss)
            float(loss.detach())
            prepared.step()
            prepared.zero_grad(set_to_none=True)

    try:
        return Cost(seconds=_in_group("fake", size, body))
    except RuntimeError:  # DDP finds no result in the works of torch's fake group
        return Cost(seconds=float("nan"))


def simulated(engine: str, size: int, layout: Layout = Layout.NATIVE) -> Cost:
    """Train as a simulated rank with its ledger; a sharded layout is counted by the census too."""
    rank = size // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = Recorder(journal_path(folder, rank))
        context = RankContext(
            rank=rank,
            size=size,
            device=torch.device("cpu"),
            folder=folder,
            recorder=recorder,
            shares_a_process=True,
            is_simulated=True,
        )

        def body() -> None:
            recorder.claim_thread()
            drive_rank(context, _training(layout), engine)

        register_threads_backend()
        with standing_in_c10d(simulating(lambda: recorder)):
            seconds = _in_group("threads", size, body)
        recorder.close()
        ledger = read_journal(journal_path(folder, rank)).ledger
        return _seen(load_observation(observation_path(folder, rank), ledger), seconds)


def _seen(observation: Observation, seconds: float) -> Cost:
    last = [e for e in observation.ledger if e.step == STEPS - 1 and e.phase is not Phase.OBSERVE]
    return Cost(
        seconds=seconds,
        calls=len(last),
        kib_sent=sum(e.num_bytes for e in last) / 1024,
        kib_held=max((count.num_bytes for count in observation.counts), default=0) / 1024,
    )


def _compare(engine: str, size: int) -> tuple[Cost, Cost, Cost | None]:
    """Measure bare and simulated in turn, and return the medians; the first turn, of two ranks, fills caches.

    The third is simulated with the census, if the engine shards.
    """
    torch.set_num_threads(1)
    bare(engine, 2), simulated(engine, 2)
    turns = [(bare(engine, size), simulated(engine, size)) for _ in range(TURNS)]
    alone, watched = (sorted(costs, key=attrgetter("seconds")) for costs in zip(*turns, strict=True))
    is_sharding = Capability.SHARD in resolve(engine).capabilities
    counted = simulated(engine, size, Layout.SHARD) if is_sharding else None
    return alone[TURNS // 2], watched[TURNS // 2], counted


def _rows(engines: Iterable[str], sizes: Iterable[int]) -> Iterator[tuple[str, ...]]:
    for engine in engines:
        for size in sizes:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                alone, watched, counted = pool.submit(_compare, engine, size).result()
            is_measured = not isnan(alone.seconds)
            yield (
                engine,
                f"{size:,}",
                str(watched.calls),
                f"{watched.kib_sent:,.0f}",
                f"{counted.kib_held:,.1f}" if counted else "-",
                f"{alone.seconds:.2f}" if is_measured else "-",
                f"{watched.seconds:.2f}",
                f"{watched.seconds / alone.seconds:.2f}" if is_measured else "-",
                f"{counted.seconds / alone.seconds:.2f}" if is_measured and counted else "-",
            )


HEAD = (
    "engine",
    "ranks",
    "calls per step",
    "KiB per step",
    "KiB held",
    "bare, s",
    "simulated, s",
    "ratio",
    "with census",
)


def main() -> None:
    """Print one row for each engine and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", action="append", help=f"default: {', '.join(ENGINES)}")
    parser.add_argument("--size", action="append", type=int, help="default: 2 to 16,384")
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for row in _rows(arguments.engine or ENGINES, arguments.size or SIZES):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
