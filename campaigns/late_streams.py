"""How the bundled engines, and wrong engines that do not wait, train where streams are late; prints a table.

On an accelerator of host memory whose work waits in queues (``HOSTMEM_SEED``, tests/hostmem) a missing wait is a wrong
number, in an order that the seed draws. Run: ``python -m campaigns.late_streams [--seeds 20] [--workers 2]``. It
needs g++. Each training is judged without a watch, which orders the streams that it sees. The exit code is 1 if a
bundled engine does not conform.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.mutants.mutant import Trace
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import read_run

_ROOT = Path(__file__).resolve().parents[1]
_ENGINES = ("torch.ddp", "torch.fsdp1", "torch.fsdp2", "torch.replicate", "reference", "reference.wrapper")
_WORLD = "threads:2:hostmem"
_CASES = (  # the second is of what every engine declares
    "parity/test_multi_group.py::test_trains_with_several_parameter_groups[mlp_uneven]",
    "smoke/test_smoke.py::test_trains_the_same_model",
)


def main() -> int:
    """Judge each engine under each seed, and print how many seeds were red."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="default: %(default)d")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: %(default)d")
    asked = parser.parse_args()
    mutants = {m.engine_spec: m.name for m in MUTANTS if m.trace is Trace.RACES}
    engines = [*_ENGINES, *mutants]
    red: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    for seed in range(asked.seeds):
        records = list(_records(engines, seed, asked.workers))
        judged.update(record.engine for record in records if record.verdict is not Verdict.UNSUPPORTED)
        bad = [record for record in records if not record.verdict.is_conforming]
        red.update({record.engine for record in bad})
        for record in bad:
            if record.engine in _ENGINES:
                print(f"seed {seed}: {record.engine} {record.case}: {record.headline[:300]}", flush=True)
        print(f"seed {seed}: {len(records)} records", file=sys.stderr, flush=True)
    rows = [[mutants.get(e, e), judged[e], red[e]] for e in engines]
    headers = ["engine", "trainings", f"red under N of {asked.seeds} seeds"]
    print(tabulate(rows, headers=headers, tablefmt="github"))
    return int(any(red[engine] for engine in _ENGINES))


def _records(engines: Sequence[str], seed: int, workers: int) -> Iterator[Record]:
    environment = os.environ | {
        "HOSTMEM_SEED": str(seed),
        "PYTHONPATH": os.pathsep.join(
            [str(_ROOT / "tests" / "hostmem"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "shardproof", "run", f"--world={_WORLD}"]
        command += [*(f"--case={case}" for case in _CASES), *(f"--engine={engine}" for engine in engines)]
        command += ["-n", str(workers), "--quiet", "--no-locate", "--out", str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        # A run that was cut off has fewer records, none of which is red.
        run = read_run(out) if out.exists() else None
        if run is None or run.is_interrupted:
            raise SystemExit(
                f"seed {seed}: expected a whole run, got exit code {done.returncode}: {done.stderr[-2000:]}"
            )
        yield from run.records


if __name__ == "__main__":
    sys.exit(main())
