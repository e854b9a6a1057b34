"""The command ``shardproof explore``: draw programs, judge them, shrink and save those that fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardproof.engine.registry import check_spelling
from shardproof.fixtures.programs.laws import laws_of
from shardproof.fixtures.programs.script import standalone, unshown
from shardproof.fixtures.programs.space import SPACE
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.cases.space import Program
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.errors import UsageError
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.records.run import write_file
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.engines import describe
from shardproof.harness.runner.exploration import Exploration, Hunt, Progress, ShrunkFailure
from shardproof.harness.runner.options import RunOptions
from shardproof.harness.tracing.arcs import COUNTS_ARCS, can_count
from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, warm_up
from shardproof.harness.worlds.spec import WorldSpec

__all__ = ["ExploreRequest", "explore_programs", "print_script"]

KNOWN = tuple(
    SUITES / "combinations" / f"{name}.txt"
    for name in ("found_units", "found_wrapped", "found_replicas", "found_shares")
)
_FOUND = "found.txt"
_SHOWN_BY_SCRIPTS = {
    "",
    MatchesOracle().name,
}  # scripts compare numbers, and report exceptions first


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreRequest:
    """What to explore, for how long, and where to write findings."""

    engine: str
    world: str
    out: Path
    seed: int = 0
    minutes: float = 5.0
    num_programs: int | None = None
    deadline_s: float = 60.0
    effort: RunOptions = field(default_factory=RunOptions)


def explore_programs(request: ExploreRequest) -> int:
    """Judge the programs that once failed, then others; save new findings.

    Returns 1 if any program fails, known ones included.
    """
    import torch  # here, because only this command needs the programs' models

    started = time.monotonic()
    check_spelling(request.engine)
    torch.set_num_threads(1)
    draw_hash_seeds(request.effort.seed)
    warm_up(request.deadline_s)
    world = WorldSpec.parse(request.world, deadline_s=request.deadline_s)
    space = SPACE.within(describe(request.engine).capabilities)
    exploration = Exploration(
        space=space,
        training=training_of,
        laws=laws_of,
        cell=Cell(engine=request.engine, world=world),
        effort=request.effort,
    )
    hunt = Hunt(exploration=exploration, seed=request.seed)
    if not can_count():
        print(
            f"the engine's code is not counted: {COUNTS_ARCS} is missing, or a debugger traces",
            file=sys.stderr,
        )
    plain = hunt.failing(Program())
    if plain is not None:
        write_finding(plain, request.engine, request.world, request.out)
        print(f"the plain program fails, so others show nothing more: {plain.symptom}; see {request.out}")
        return DOES_NOT_CONFORM
    known = [p for p in read_programs(*KNOWN, request.out / _FOUND) if space.has(p)]
    hunt.findings += [f for p in known if (f := hunt.failing(p)) is not None]
    print(f"{len(known)} known programs: {len(hunt.findings)} fail", flush=True)
    num_new = 0  # others fail as a known program does, with other values in other dimensions
    try:
        until = started + 60 * request.minutes
        for finding in hunt.run(until=until, num_programs=request.num_programs):
            num_new += 1
            write_finding(finding, request.engine, request.world, request.out)
            print(f"{finding.program}\n  {finding.symptom}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    _write_progress(hunt.progress, request.out, started)
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(hunt.verdicts.items()))
    print(
        f"{hunt.num_judged} programs in {time.monotonic() - started:.0f} s: {verdicts}; "
        f"{len(hunt.seen)} of {len(space.combinations)} combinations seen; "
        f"{len(exploration.arcs)} arcs of the engine run; {num_new} new failures in {request.out}"
    )
    # A known program that fails here may have failed on another engine.
    return DOES_NOT_CONFORM if hunt.findings else CONFORMS


def _write_progress(progress: Sequence[Progress], out: Path, started: float) -> None:
    """Write a row for each drawn program: the combinations seen and arcs run so far."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{p.time_s - started:.1f},{p.num_programs},{p.num_combinations},{p.num_arcs}\n" for p in progress
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
