"""What `shardproof explore` keeps: programs that failed, with a report and a script of each.

Here rather than in the command's file, because the space of programs imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardproof.fixtures.programs.script import standalone, unshown
from shardproof.fixtures.programs.space import SPACE
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.cases.space import Program
from shardproof.harness.cli.exit_codes import CONFORMS
from shardproof.harness.errors import UsageError
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.records.run import write_file
from shardproof.harness.runner.exploration import Progress, ShrunkFailure
from shardproof.harness.worlds.spec import WorldSpec

KNOWN = tuple(sorted((SUITES / "combinations").glob("found_*.txt")))
_FOUND = "found.txt"
_SHOWN_BY_SCRIPTS = {
    "",
    MatchesOracle().name,
}  # scripts compare numbers, and report exceptions first


def known_programs(out: Path) -> list[Program]:
    """Return the programs that once failed: the bundled ones, and those in a folder of findings."""
    return read_programs(*KNOWN, out / _FOUND)


def read_programs(*files: Path) -> list[Program]:
    """Read the programs of these files, one per line; text after # is a comment."""
    lines = [
        line.partition("#")[0].strip() for f in files if f.exists() for line in f.read_text().splitlines()
    ]
    return list(dict.fromkeys(SPACE.parse(line) for line in lines if line))


def write_finding(finding: ShrunkFailure, engine: str, world: str, out: Path) -> None:
    """Add a finding to the programs that run first next time; write its report and, if possible, its script."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / _FOUND).open("a") as file:
        file.write(f"{finding.program}\n")
    number = len(list(out.glob("finding-*.md"))) + 1
    script = None
    if finding.symptom.law in _SHOWN_BY_SCRIPTS:
        size = WorldSpec.parse(world).size
        script = standalone(finding.program, engine, finding.record.headline, size=size)
    if script is not None:
        write_file(out / f"finding-{number}.py", script)
    write_file(out / f"finding-{number}.md", _report(finding, world, script, number))


def _report(finding: ShrunkFailure, world: str, script: str | None, number: int) -> str:
    record, details = finding.record, [d for law in finding.record.laws if not law.held for d in law.details]
    shown = (
        f"`torchrun --nproc-per-node {WorldSpec.parse(world).size} finding-{number}.py` shows it with only torch."
        if script
        else "No script without Shardproof shows it: not for these choices, or not what this law judges."
    )
    return f"""# {finding.program}

{record.engine} ({record.engine_version}) in {world}: {finding.symptom}

> {record.headline}

{"".join(f"- {line}{chr(10)}" for line in details[:8])}
{shown}

As a case:

```python
def test_trains(trial: Trial) -> None:
    program = SPACE.parse("{finding.program}")
    trial.holds(training_of(program), *laws_of(program))
```

Drawn as `{finding.drawn}`.
"""


def write_progress(progress: Sequence[Progress], out: Path, started_s: float) -> None:
    """Write a row for each drawn program: the combinations seen and arcs run so far."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{p.time_s - started_s:.1f},{p.num_programs},{p.num_combinations},{p.num_arcs}\n" for p in progress
    ]
    write_file(out / "progress.csv", "".join(["seconds,programs,combinations,arcs\n", *rows]))


def print_script(text: str, engine: str, world: str) -> int:
    """Print the script of one program; raises UsageError if it has none."""
    program = SPACE.parse(text)
    script = standalone(program, engine, "judged by hand", size=WorldSpec.parse(world).size)
    if choices := unshown(program):
        raise UsageError(
            "--script",
            expected="choices that a script can show",
            got=", ".join(choices),
            hint="the program without them",
        )
    if script is None:
        raise UsageError(
            "--script",
            expected="an engine that has the layout and that scripts support",
            got=engine,
            hint="--engine torch.fsdp2",
        )
    print(script, end="")
    return CONFORMS
