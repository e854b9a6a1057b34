"""What watches over streams and memory cost: a training step plain, under an empty dispatch mode, and under watches.

Run: ``python -m benchmarks.watch_overhead [--world threads:2] [--turns 20]``
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from operator import truediv
from pathlib import Path
from statistics import median, quantiles

from tabulate import tabulate

from benchmarks.watch_work import WATCHES, WORK, measure
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.outcome import Returned, causal
from shardproof.harness.worlds.spec import WorldSpec

_DEADLINE_S = 300.0  # of one model; ten times as long as it takes on two cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", default="threads:2")
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.turns < 2:
        parser.error("--turns: quartiles need two turns or more")
    spec = WorldSpec.parse(arguments.world, deadline_s=_DEADLINE_S)
    rows = [_row(name, spec, arguments.turns) for name in WORK]
    headers = ["step", "plain ms", *(f"{w} / plain [quartiles]" for w in list(WATCHES)[1:])]
    print(tabulate(rows, headers=headers, disable_numparse=True))


def _row(name: str, spec: WorldSpec, num_turns: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        result = launch(spec, measure, name, num_turns, folder=Path(folder) / "world")
    if not result.is_clean:
        sys.exit(f"{name}: {causal(result) or result.leaks}")
    ranks = [outcome.value for outcome in result.outcomes if isinstance(outcome, Returned)]
    # A step takes as long as its slowest rank; a ratio is of one turn, so that a change of speed affects both.
    slowest = {w: [max(of_turn) for of_turn in zip(*(r[w] for r in ranks), strict=True)] for w in WATCHES}
    cells = [name, f"{median(slowest['plain']) * 1e3:.2f}"]
    for watch in list(WATCHES)[1:]:
        ratios = list(map(truediv, slowest[watch], slowest["plain"]))
        first, _, third = quantiles(ratios, n=4, method="inclusive")
        cells.append(f"{median(ratios):.2f} [{first:.2f}, {third:.2f}]")
    return cells


if __name__ == "__main__":
    main()
