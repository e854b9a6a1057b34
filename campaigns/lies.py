"""A campaign of lies: engines that train honestly and misreport, drawn from a space, and judged by the minimum.

    python -m campaigns.lies --lies 40 --seed 0

Each lie must be red, or stand below with the reason why it cannot be seen. The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from campaigns.liars import LIES, How, Lie, What, When
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import read_run

# The cases in which a lie is told, and in which it is the only fault.
_CASES = {
    When.ALWAYS: "trains_the_same_model and not 64 or keeps_buffers or holds_its_share",
    When.LATE: "64_steps",
    When.LARGE: "beyond",
}
_LIMIT_S = 3000.0


def unseen_because(lie: Lie) -> str:
    """Return why no case can see a lie; empty if one has to."""
    if lie.what is What.BUFFERS and lie.when is not When.ALWAYS:
        return "the models of the horizon have no buffers"
    if lie.what is What.BUFFERS and lie.how is How.AVERAGED:
        return ""
    if lie.what is What.MODULE and lie.how is How.FROZEN and lie.when is When.ALWAYS:
        return "told: the module is left as it was built, and 0 parameters are compared"
    return ""


def judged(lies: Sequence[Lie], folder: Path) -> dict[str, list[Record]]:
    """Judge the lies, those of one kind of moment in one run; return the records of each."""
    found: dict[str, list[Record]] = {lie.name: [] for lie in lies}
    for when, keyword in _CASES.items():
        engines = [f"--engine=campaigns.liars:{lie.name}" for lie in lies if lie.when is when]
        if not engines:
            continue
        out = folder / when.name
        suites = ("--suite=smoke", "--suite=horizon", "--suite=parity")
        command = [sys.executable, "-m", "shardproof", "run", *engines, *suites, "-k", keyword, "--quiet"]
        subprocess.run([*command, f"--out={out}", "-n2"], timeout=_LIMIT_S, check=False, stdout=sys.stderr)
        for record in read_run(out).records:
            found[record.engine.rpartition(":")[2]].append(record)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and print its table; returns 1 if a lie was green without a reason."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lies", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    arguments = parser.parse_args(argv)
    names = random.Random(arguments.seed).sample(sorted(LIES), min(arguments.lies, len(LIES)))
    lies = [LIES[name] for name in names]
    with tempfile.TemporaryDirectory(prefix="sp") as folder:
        found = judged(lies, Path(folder))
    rows, num_missed = [], 0
    for lie in sorted(lies, key=lambda lie: lie.name):
        red = [record for record in found[lie.name] if not record.verdict.is_conforming]
        reason = unseen_because(lie)
        num_missed += not red and not reason
        verdict = str(red[0].verdict) if red else reason or "GREEN"
        headline = red[0].headline[:60] if red else f"{_num_passed(found[lie.name])} cases passed"
        rows.append([lie.name, verdict, headline])
    print(tabulate(rows, headers=["lie", "verdict", "by"]))
    print(f"{len(lies)} of {len(LIES)} lies judged, {num_missed} green without a reason")
    return bool(num_missed)


def _num_passed(records: Sequence[Record]) -> int:
    return sum(record.verdict is Verdict.PASSED for record in records)


if __name__ == "__main__":
    sys.exit(main())
