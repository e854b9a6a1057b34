"""What `shardproof check` costs: processor time and memory beside those of training the model itself.

Training is two ranks' worth of the steps that the check has its engine train, in one process without a harness. Memory
is the proportional share (PSS) of all processes at its peak; that of training is one process's, once for each rank.
Run: ``python -m benchmarks.check_cost [--millions 100] [--engine torch.fsdp2] [--keyword EXPR]``
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from shardproof.harness.records.run import read_run

_RANKS = 2
_STEPS = 3
_MICROBATCHES = {"accumulates": 3}  # by the first word of a case's name; else 1
_STEPS_BEFORE = {"starts": _RANKS + 1}  # steps of one rank, in a world of one more that trains first
_PAUSE_S = 1.0  # between two memory samples, which take time themselves
_VARIABLE = "CHECK_COST_MILLIONS"


class Decoder:
    """Feed-forward blocks of a decoder's proportions, as many as needed for the number of parameters."""

    units = ("blocks.*",)

    def build(self) -> nn.Module:
        millions = float(os.environ.get(_VARIABLE, "1"))
        width = 256 if millions < 20 else 1024
        depth = max(1, round(millions * 1e6 / (8 * width * width)))
        model = nn.Sequential()
        model.add_module("blocks", nn.Sequential(*(Block(width) for _ in range(depth))))
        return model

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(
            8, 16, 256 if float(os.environ.get(_VARIABLE, "1")) < 20 else 1024, generator=generator
        )

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (output - batch.roll(1, 1)).square().mean()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        narrowed: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm(hidden))))
        return hidden + narrowed


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    peak_bytes: int


def main() -> None:
    arguments = _parser().parse_args()
    os.environ[_VARIABLE] = str(arguments.millions)
    if arguments.passes:
        _train(arguments.passes, arguments.updates)
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        where = ["--engine", arguments.engine, "--world", f"threads:{_RANKS}", "--out", str(out)]
        checked = measured(
            ["-m", "shardproof", "check", f"{__file__}:Decoder", *where, "-k", arguments.keyword or "test"]
        )
        names = [record.case.rpartition("::test_")[2] for record in read_run(out).records if record.worst]
        slowest = sorted(read_run(out).records, key=lambda record: -record.duration_s)[:3]
    kinds = [name.partition("_")[0] for name in names]
    before = sum(_STEPS_BEFORE.get(kind, 0) for kind in kinds)
    passes = sum(_STEPS * _RANKS * _MICROBATCHES.get(kind, 1) for kind in kinds) + before
    updates = _STEPS * _RANKS * len(names) + before
    options = ("--millions", str(arguments.millions), "--passes", str(passes), "--updates", str(updates))
    trained = measured(["-m", "benchmarks.check_cost", *options])
    rows = [
        ("processor time [s]", trained.cpu_s, checked.cpu_s, checked.cpu_s / trained.cpu_s),
        (
            "peak memory [MiB]",
            _RANKS * trained.peak_bytes / 2**20,
            checked.peak_bytes / 2**20,
            checked.peak_bytes / (_RANKS * trained.peak_bytes),
        ),
    ]
    print(f"{arguments.millions} million parameters, {len(names)} cases proven, {passes} passes")
    print(tabulate(rows, headers=("", "training", "check", "ratio"), floatfmt=".1f"))
    for record in slowest:
        print(f"slowest: {record.case.rpartition('::')[2]} {record.duration_s:.1f} s")


def measured(arguments: Sequence[str]) -> Cost:
    """Run Python, and add up the cost of it and all its descendants, as far as sampling sees them."""
    process = subprocess.Popen([sys.executable, *arguments])
    peak, cpu, done = [0], dict[int, float](), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, peak, cpu, done))
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    if code:
        raise SystemExit(f"{arguments[:3]} ended with {code}")
    return Cost(sum(cpu.values()), peak[0])


def _watch(root: int, peak: list[int], cpu: dict[int, float], done: threading.Event) -> None:
    while not done.wait(_PAUSE_S):
        processes = _below(root)
        cpu.update({process: spent for process in processes if (spent := _cpu_s(process))})
        peak[0] = max(peak[0], sum(map(_share, processes)))


def _cpu_s(process: int) -> float:
    """Return the processor time of a process itself: this process does not wait for descendants of a fork server."""
    try:
        found = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK")


def _below(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def _share(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _train(passes: int, updates: int) -> None:
    torch.set_num_threads(1)
    problem = Decoder()
    model = problem.build()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(passes):
        batch = problem.batch(torch.Generator().manual_seed(number))
        problem.loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if number * updates // passes != (number + 1) * updates // passes:
            optimizer.step()
            optimizer.zero_grad()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=100.0, help="parameters")
    parser.add_argument("--engine", default="torch.fsdp2")
    parser.add_argument("--keyword", default="")
    parser.add_argument("--passes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, default=1, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
