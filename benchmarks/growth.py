"""How cost grows: of each reader of a run with its records, and of a world of threads with its ranks.

Run: ``python -m benchmarks.growth RUN [--records 2500 5000 10000 20000] [--ranks 2 8 32 64]``. The records of RUN, a
folder that `shardproof run` wrote, are repeated under other case ids. A cost that grows linearly has the same figure
per record or rank in every row. Seconds are those of the processor; memory is what a process needs above its imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import ParamSpec, TypeVar

from tabulate import tabulate

from benchmarks.world_work import timed_body
from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.diff.comparison import compare
from shardproof.harness.records.record import Footer, to_json
from shardproof.harness.records.run import RECORDS, RUN, read_run
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.outcome import Returned
from shardproof.harness.worlds.spec import WorldKind, WorldSpec
from shardproof.reports.diff_text import render
from shardproof.reports.write import write_reports

P = ParamSpec("P")
T = TypeVar("T")

_MIB = 2**10  # in the KiB of ru_maxrss


def _read(folder: Path) -> None:
    read_run(folder)


def _report(folder: Path) -> None:
    write_reports(folder)


def _diff(folder: Path) -> None:
    side = ComparedRun(folder=str(folder), run=read_run(folder))
    render(compare(side, side))


READERS: dict[str, Callable[[Path], None]] = {"read": _read, "reports": _report, "diff": _diff}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--records", type=int, nargs="+", default=[2_500, 5_000, 10_000, 20_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    arguments = parser.parse_args()
    rows = [*_by_records(arguments.run, arguments.records), *_by_ranks(arguments.ranks)]
    print(tabulate(rows, headers=["what", "number", "ms each", "MiB"], disable_numparse=True))


def _by_records(run: Path, sizes: list[int]) -> Iterator[list[str]]:
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _apart(_write, run, size, folder)
            for reader in READERS:
                seconds, mib = _apart(_measured, reader, folder)
                yield [f"{reader}, records", f"{size:,}", f"{seconds / size * 1e3:.2f}", f"{mib:.0f}"]


def _apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a process of its own, which has read nothing before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _write(source: Path, size: int, folder: Path) -> None:
    """Write a finished run of this many records; not with a `RunWriter`, which waits for the disk after each."""
    run = read_run(source)
    records = islice(cycle(run.records), size)
    lines = (to_json(replace(record, case=f"{record.case}-{n}")) for n, record in enumerate(records))
    (folder / RECORDS).write_text("".join(f"{line}\n" for line in lines))
    footer = Footer(ended_at=run.header.started_at, duration_s=0.0)
    (folder / RUN).write_text(f"{to_json(run.header)}\n{to_json(footer)}\n")


def _measured(reader: str, folder: Path) -> tuple[float, float]:
    """Return processor seconds, and the largest growth of the process in MiB."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    READERS[reader](folder)
    seconds = time.process_time() - started
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / _MIB


def _by_ranks(sizes: list[int]) -> Iterator[list[str]]:
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            result = launch(
                WorldSpec(kind=WorldKind.THREADS, size=size), timed_body, folder=Path(folder) / "world"
            )
        if not result.is_clean:
            raise RuntimeError(f"{size} ranks: {result}")
        seconds = max(outcome.value for outcome in result.outcomes if isinstance(outcome, Returned))
        yield ["training, ranks that are threads", str(size), f"{seconds / size * 1e3:.1f}", "-"]


if __name__ == "__main__":
    main()
