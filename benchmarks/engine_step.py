"""What a training step costs: our reference engine beside torch's, in one world, in turn, in one run.

The ranks of each world build all engines and take turns step by step; a ratio is taken within one round, of the time
that passed and of the processor's time, which other programs on the machine change less.
Run: ``python -m benchmarks.engine_step [--quick] [--wrapper] [--world processes:2] [--rounds 6]``
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing.connection import wait
from operator import truediv
from pathlib import Path
from statistics import median, quantiles

from tabulate import tabulate

from benchmarks.engine_work import (
    COMPOSABLE,
    FLAT_WRAPPERS,
    LOSS_TOLERANCE,
    WRAPPERS,
    Name,
    Reshard,
    Taken,
    Work,
    compare_as_process,
    compare_as_thread,
    rank_file,
)
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.outcome import Raised, causal
from shardproof.harness.worlds.processes.forkserver import started
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

WORLDS = ("processes:2", "processes:4", "threads:4")
ACCUMULATION = (1, 4)
# Of one configuration; ten times as long as the slowest takes on two cores.
DEADLINE_S = 300.0
HEADERS = (
    "world",
    "reshard",
    "accumulation",
    "engine",
    "step ms",
    "first/this",
    "of processor",
    "peak MiB",
    "sent/min",
)


class ConfigurationFailedError(Exception):
    """A rank did not return, or engines that should compute the same did not."""


def main() -> None:
    arguments = _arguments()
    failures = []
    rows: list[list[str]] = []
    for text, work in _configurations(arguments):
        where = f"{text}, reshard {work.reshard}, accumulation {work.num_microbatches}"
        try:
            ranks = _measure(WorldSpec.parse(text, deadline_s=DEADLINE_S), work)
        except ConfigurationFailedError as error:
            failures.append(f"{where}: {error}")
            continue
        for cells in _cells(ranks):
            rows.append([text, work.reshard, str(work.num_microbatches), *cells])
            # An interrupted run has then printed some results.
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    print(tabulate(rows, headers=HEADERS, disable_numparse=True))
    if failures:
        sys.exit("\n".join(failures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", action="append", help=f"KIND:SIZE; default: {' '.join(WORLDS)}")
    parser.add_argument("--rounds", type=int, default=6, help="paired rounds; a multiple of six is fairest")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 8, the number of heads")
    parser.add_argument(
        "--wrapper",
        action="store_true",
        help="our FullyShardedDataParallel beside torch's, not FSDP2 and DDP",
    )
    parser.add_argument("--quick", action="store_true", help="one tiny configuration, to see that it runs")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: quartiles need two rounds or more")
    return arguments


def _configurations(arguments: argparse.Namespace) -> Iterator[tuple[str, Work]]:
    if arguments.quick:
        yield (
            (arguments.world or WORLDS)[0],
            Work(
                num_blocks=2,
                width=64,
                num_rows=2,
                length=16,
                reshard=Reshard.AFTER_FORWARD,
                num_microbatches=2,
                num_rounds=2,
                names=WRAPPERS if arguments.wrapper else COMPOSABLE,
            ),
        )
        return
    sets = (WRAPPERS, FLAT_WRAPPERS) if arguments.wrapper else (COMPOSABLE,)
    for text, names, reshard, num_microbatches in product(
        arguments.world or WORLDS, sets, Reshard, ACCUMULATION
    ):
        yield (
            text,
            Work(
                num_blocks=arguments.blocks,
                width=arguments.width,
                num_rows=2,
                length=32,
                reshard=reshard,
                num_microbatches=num_microbatches,
                num_rounds=arguments.rounds,
                names=names,
            ),
        )


def _measure(spec: WorldSpec, work: Work) -> list[dict[Name, Taken]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_threads = spec.kind is WorldKind.THREADS
        taken = (_on_threads if is_threads else _on_processes)(spec, work, folder)
    ranks = [{t.name: t for t in of_rank} for of_rank in taken]
    for rank, of_rank in enumerate(ranks):
        losses = [t.loss for t in of_rank.values()]
        if max(losses) - min(losses) > LOSS_TOLERANCE:
            raise ConfigurationFailedError(f"rank {rank}: expected one loss from all engines, got {losses}")
    return ranks


def _on_threads(spec: WorldSpec, work: Work, folder: Path) -> list[tuple[Taken, ...]]:
    result = launch(spec, compare_as_thread, work, folder=folder)
    if not result.is_clean:
        cause = causal(result)
        shown = f"{cause.kind}: {cause.message}\n{cause.traceback}" if isinstance(cause, Raised) else cause
        raise ConfigurationFailedError(f"{shown or result.leaks}")
    return [pickle.loads(rank_file(folder, rank).read_bytes()) for rank in range(spec.size)]


def _on_processes(spec: WorldSpec, work: Work, folder: Path) -> list[tuple[Taken, ...]]:
    processes = [
        started(compare_as_process, rank, spec.size, folder, work, limit_s=spec.deadline_s)
        for rank in range(spec.size)
    ]
    stop_at = time.monotonic() + spec.deadline_s
    try:
        while running := [p for p in processes if p.exitcode is None]:
            if not wait([p.sentinel for p in running], timeout=stop_at - time.monotonic()):
                raise ConfigurationFailedError(f"ranks still running after {spec.deadline_s:.0f} s")
            if any(p.exitcode for p in processes):
                raise ConfigurationFailedError("a rank failed; its traceback is above")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [pickle.loads(rank_file(folder, rank).read_bytes()) for rank in range(spec.size)]


def _cells(ranks: Sequence[dict[Name, Taken]]) -> Iterator[list[str]]:
    """Yield the cells of each engine; a round takes as long as its slowest rank, the rest is the worst rank's.

    Processor time is the sum over all ranks.
    """
    names = list(ranks[0])
    rounds = {
        name: [max(seconds) for seconds in zip(*(taken[name].seconds for taken in ranks), strict=True)]
        for name in names
    }
    computed = {
        name: [sum(seconds) for seconds in zip(*(taken[name].processor_s for taken in ranks), strict=True)]
        for name in names
    }
    for name in names:
        peaks = [peak for taken in ranks if (peak := taken[name].peak_bytes) is not None]
        is_first = name is names[0]
        yield [
            name,
            f"{median(rounds[name]) * 1e3:.1f}",
            "" if is_first else _ratios(rounds[names[0]], rounds[name]),
            "" if is_first else _ratios(computed[names[0]], computed[name]),
            f"{max(peaks) / 2**20:.1f}" if peaks else "",
            f"{max(t[name].sent_bytes / t[name].least_bytes for t in ranks):.3f}",
        ]


def _ratios(first: Sequence[float], other: Sequence[float]) -> str:
    """Return the median of paired ratios, and the quartiles."""
    ratios = list(map(truediv, first, other))
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return f"{median(ratios):.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
