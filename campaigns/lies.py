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
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from campaigns.liars import LIES, How, Lie, What, When
from shardproof.harness.records.record import Record
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
    if lie.what is What.MODULE and lie.how is How.FROZEN and lie.when is When.ALWAYS:
        return "told: the module is left as it was built, and 0 parameters are compared"
    return ""


def judged(lies: Sequence[Lie], world: str, folder: Path) -> dict[str, list[Record]]:
    """Judge the lies, those of one kind of moment in one run; return the records of each."""
    records: dict[str, list[Record]] = {lie.name: [] for lie in lies}
    for when, keyword in _CASES.items():
        engines = [f"--engine=campaigns.liars:{lie.name}" for lie in lies if lie.when is when]
        if not engines:
            continue
        out = folder / when.name
        suites = ("--suite=smoke", "--suite=horizon", "--suite=parity")
        command = [sys.executable, "-m", "shardproof", "run", *engines, *suites, "-k", keyword, "--quiet"]
        command += [f"--world={world}", f"--out={out}", "-n2"]
        subprocess.run(command, timeout=_LIMIT_S, check=False, stdout=sys.stderr)
        for record in read_run(out).records:
            records[record.engine.rpartition(":")[2]].append(record)
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and print its table; returns 1 if a lie was green without a reason."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lies", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--world", default="threads:2")
    arguments = parser.parse_args(argv)
    names = random.Random(arguments.seed).sample(sorted(LIES), min(arguments.lies, len(LIES)))
    lies = [LIES[name] for name in names]
    with tempfile.TemporaryDirectory() as folder:
        records = judged(lies, arguments.world, Path(folder))
    laws = {lie.name: _seen_by(records[lie.name]) for lie in lies}
    kinds = sorted({(lie.what, lie.how) for lie in lies}, key=lambda kind: [part.name for part in kind])
    rows = [
        _row(what, how, [lie for lie in lies if (lie.what, lie.how) == (what, how)], laws)
        for what, how in kinds
    ]
    print(
        tabulate(
            rows, headers=["read", "shown instead", "judged", "red", "by, or why not"], tablefmt="github"
        )
    )
    missed = [lie.name for lie in lies if not laws[lie.name] and not unseen_because(lie)]
    print(
        f"{len(lies)} of {len(LIES)} lies judged in {arguments.world}, {len(missed)} green without a reason"
    )
    print("\n".join(missed))
    return bool(missed)


def _seen_by(records: Sequence[Record]) -> str:
    """Name the first law that a lie broke; empty if all cases passed."""
    red = [record for record in records if not record.verdict.is_conforming]
    return red[0].headline.partition(":")[0] if red else ""


def _row(what: What, how: How, lies: Sequence[Lie], laws: Mapping[str, str]) -> list[object]:
    seen = Counter(laws[lie.name] for lie in lies)
    unseen = {unseen_because(lie) for lie in lies if not laws[lie.name]}
    num_red = len(lies) - seen.pop("", 0)
    return [what.value, how.value, len(lies), num_red, "; ".join([*seen, *sorted(unseen)])]


if __name__ == "__main__":
    sys.exit(main())
