"""How many mutants die within which time, if `shardproof run --within` orders the cases.

Run: ``python -m benchmarks.time_limit [--within 120] [--engine NAME ...]``. Each engine is judged alone, by two
workers. A mutant counts as dead once a case has ended that kills it, as `suites/kill_power.json` has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from shardproof.harness.records.run import read_run
from shardproof.harness.runner.engines import describe
from shardproof.harness.runner.kill_power import read_kill_power
from shardproof.harness.worlds.spec import WorldSpec

_ENGINES = ("torch.ddp", "torch.fsdp2", "reference.wrapper", "reference.zero2")
_WORLDS = ("threads:2", "threads:4")
_WORKERS = 2
_TIMES_S = (15, 30, 60, 120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append")
    parser.add_argument("--within", type=int, default=_TIMES_S[-1])
    arguments = parser.parse_args()
    times = [time for time in _TIMES_S if time <= arguments.within]
    rows = [_row(engine, arguments.within, times) for engine in arguments.engine or _ENGINES]
    print(tabulate(rows, headers=["engine", "mutants", "cases", *(f"dead in {t} s" for t in times)]))


def _row(engine: str, within_s: int, times: Sequence[int]) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        worlds = [f"--world={world}" for world in _WORLDS]
        command = ["run", f"--engine={engine}", *worlds, f"--within={within_s}s", f"-n={_WORKERS}", "--quiet"]
        subprocess.run(
            [sys.executable, "-m", "shardproof.harness.cli.main", *command, f"--out={out}"], check=True
        )
        run = read_run(out)
    assert run.footer is not None
    (had,) = run.footer.powers
    dead = dict(_deaths(engine, [(r.case, r.world, r.duration_s) for r in run.records]))
    shares = [sum(at <= time for at in dead.values()) / max(1, had.num_killable) for time in times]
    return [engine, had.num_killable, had.num_ran, *(f"{share:.0%}" for share in shares)]


def _deaths(engine: str, ran: Sequence[tuple[str, str, float]]) -> Iterator[tuple[int, float]]:
    """Yield each mutant with the time [s] at which the first case ended that kills it."""
    table, declared = read_kill_power(), frozenset(each.name for each in describe(engine).capabilities)
    dead, spent_s = 0, 0.0
    for case, world, took_s in ran:
        spent_s += took_s / _WORKERS
        new = table.kills(case, WorldSpec.parse(world), declared) & ~dead
        dead |= new
        yield from ((number, spent_s) for number in range(new.bit_length()) if new >> number & 1)


if __name__ == "__main__":
    main()
