"""Measures which mutants each case kills, and how long each case takes: `python -m campaigns.kill_power`, an hour.

`shardproof run --within` orders cases by the result, `suites/kill_power.json`. Two honest runs give durations and what
each case needs, `kills` marks give what `shardproof mutants` proves, and then rows of `combinations` are run on the
mutants that no earlier row killed: a mutant matters to the order where it dies first. Mutants that the table has are
not run again, unless called with ``--anew``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from shardproof.engine.mutants.mutant import Trace
from shardproof.fixtures.programs.laws import laws_of
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.audit.kill_matrix import Target
from shardproof.harness.audit.marks import WORLDS, Selection, read_selection
from shardproof.harness.audit.shipped_mutants import shipped
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.cases.space import Program
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import read_run, write_file
from shardproof.harness.runner import engines
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.invoke import call_pytest
from shardproof.harness.runner.kill_power import KILL_POWER
from shardproof.harness.runner.options import RunOptions
from shardproof.harness.runner.session import Source, TrialSession
from shardproof.harness.verdicts.case import Case
from shardproof.harness.worlds.processes.forkserver import warm_up
from shardproof.harness.worlds.spec import WorldSpec
from shardproof.suites.combinations.rows import Row, has_expectation, rows_in

_HONEST = (
    "torch.fsdp2",
    "torch.ddp",
    "reference.wrapper",
    "reference.zero2",
)  # declare together what cases need
_WORLD, _WORKERS = "threads:2", 2
_ROUNDS, _ROWS = 2, 3  # so many rows of each family go on all mutants at a time
_FAMILIES = {
    "units": "test_units",
    "wrapped": "test_wrapped_units",
    "replicas": "test_loops_of_replicas",
    "shares": "test_shares_of_the_state",
}
_Pair = tuple[Target, str, Program]


@dataclass(kw_only=True)
class _Table:
    """What was measured, in the form of the file."""

    mutants: list[str] = field(default_factory=list)
    needs: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    kills: dict[str, dict[str, set[int]]] = field(default_factory=dict)  # by case and world

    @classmethod
    def read(cls) -> _Table:
        plain = json.loads(KILL_POWER.read_text())
        kills = {
            case: {world: set(numbers) for world, numbers in found["kills"].items()}
            for case, found in plain["cases"].items()
        }
        return cls(mutants=plain["mutants"], kills=kills)

    def add(self, mutant: str, case: str, world: str) -> None:
        self.kills.setdefault(case, {}).setdefault(world, set()).add(self.mutants.index(mutant))

    def text(self, refusals: Iterable[str]) -> str:
        """Format the file, a case on a line."""
        lines = []
        usual = median(self.seconds.values())
        for case, worlds in sorted(self.kills.items()):
            kills = {world: sorted(numbers) for world, numbers in sorted(worlds.items())}
            seconds = round(self.seconds.get(case, usual), 2)
            found = {"seconds": seconds, "needs": self.needs[case], "kills": kills}
            lines.append(f"{json.dumps(case)}: {json.dumps(found)}")
        numbers = [self.mutants.index(name) for name in refusals]
        head = f'"mutants": {json.dumps(self.mutants)},\n"refusals": {json.dumps(numbers)},\n'
        return "{\n" + head + '"cases": {\n' + ",\n".join(lines) + "\n}\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anew", action="store_true", help="measure every mutant, not only new ones")
    parser.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp(prefix="shardproof-power-")))
    arguments = parser.parse_args()
    _ask_here()
    targets = {target.name: target for target in shipped()}
    table = _Table() if arguments.anew else _without_gone(_Table.read(), targets)
    new = [name for name in targets if name not in table.mutants]
    table.mutants += new
    table.needs = _needs(arguments.out)
    for pair in _marked(arguments.out).pairs:
        table.add(pair.mutant, pair.case, pair.world)
    _run_rows(table, {name: targets[name] for name in new}, arguments.out)
    table.kills = {case: found for case, found in table.kills.items() if case in table.needs}
    table.seconds = _seconds(arguments.out)
    write_file(
        KILL_POWER, table.text(name for name in table.mutants if targets[name].trace == Trace.REFUSAL.name)
    )
    print(f"{len(table.mutants)} mutants, {len(table.kills)} cases that kill some of them: {KILL_POWER}")


def _without_gone(table: _Table, known: Iterable[str]) -> _Table:
    """Leave out the mutants that no longer exist."""
    names, found = [name for name in table.mutants if name in known], _Table()
    found.mutants = names
    for case, worlds in table.kills.items():
        for world, numbers in worlds.items():
            for name in (table.mutants[number] for number in numbers):
                if name in names:
                    found.add(name, case, world)
    return found


def _needs(out: Path) -> dict[str, list[str]]:
    """Return what each case needs; none is run."""
    folder = out / "needs"
    if not folder.exists():
        worlds = [f"--world={world}" for world in WORLDS]
        with patch.object(TrialSession, "run", _only_told):
            call_pytest([str(SUITES), f"--engine={_HONEST[0]}", *worlds, f"--out={folder}"])
    return {record.case: list(record.needs) for record in read_run(folder).records}


def _seconds(out: Path) -> dict[str, float]:
    """Return for each case the longest that an honest engine took that passed [s]."""
    longest: dict[str, float] = {}
    for engine in _HONEST:
        folder = out / engine
        if not folder.exists():
            command = ["run", f"--engine={engine}", "-n=2", f"--out={folder}", "--quiet"]
            subprocess.run([sys.executable, "-m", "shardproof.harness.cli.main", *command], check=False)
        for record in read_run(folder).records:
            if record.verdict is Verdict.PASSED:
                longest[record.case] = max(longest.get(record.case, 0.0), record.duration_s)
    return longest


def _only_told(_: TrialSession, case: Case, cell: Cell, *, suite: str, **_others: object) -> Record:
    """Stand in for judging a case: it is not run, and its record only says what it needs."""
    return Record(
        engine=cell.engine,
        case=case.id,
        world=str(cell.world),
        verdict=Verdict.PASSED,
        headline="",
        suite=suite,
        engine_version="",
        needs=tuple(sorted(each.name for each in case.training.needs)),
    )


def _marked(out: Path) -> Selection:
    """Return the pairs of the `kills` marks, of which nothing is run."""
    folder = out / "marked"
    if not folder.exists():
        engines = [f"--engine={target.engine}" for target in shipped()]
        worlds = [f"--world={world}" for world in WORLDS]
        options = ["--mutants=marked", f"--out={folder}", "--collect-only", "--no-expectations"]
        call_pytest(
            ["-p", "shardproof.harness.audit.mutation_plugin", str(SUITES), *engines, *worlds, *options]
        )
    found = read_selection(folder)
    assert found is not None
    return found


def _run_rows(table: _Table, targets: dict[str, Target], out: Path) -> None:
    """Run rows of each family on the mutants of which no row before them killed any."""
    declared = {
        name: frozenset(c.name for c in engines.describe(t.engine).capabilities)
        for name, t in targets.items()
    }
    with ProcessPoolExecutor(_WORKERS, mp_context=get_context("spawn"), initializer=_begin) as pool:
        left = dict(targets)
        for family, function in _FAMILIES.items():
            for number, rows in enumerate(_rounds(family)):
                cases = {f"combinations/test_programs.py::{function}[{row.id}]": row.program for row in rows}
                pairs = [
                    (target, case, program)
                    for case, program in cases.items()
                    for name, target in left.items()
                    if frozenset(table.needs[case]) <= declared[name]
                ]
                for mutant, case in _killed(pool, pairs, out / f"{family}-{number}.json"):
                    table.add(mutant, case, _WORLD)
                    left.pop(mutant, None)


def _rounds(family: str) -> Iterator[list[Row]]:
    """Yield the first rows, without those that some honest engine is known to fail: its mutants fail them as well."""
    rows = [row for row in rows_in(family) if not has_expectation(row)]
    for start in range(0, _ROUNDS * _ROWS, _ROWS):
        yield rows[start : start + _ROWS]


def _killed(pool: Executor, pairs: Sequence[_Pair], file: Path) -> list[tuple[str, str]]:
    """Return which mutant died of which case; what the file has is not run again."""
    if not file.exists():
        # Neighbours share a case, whose reference a worker keeps.
        died = pool.map(_dies, pairs, chunksize=10)
        found = [(pair[0].name, pair[1]) for pair, is_dead in zip(pairs, died, strict=True) if is_dead]
        print(f"{file.stem}: {len(found)} of {len(pairs)} pairs", flush=True)
        write_file(file, json.dumps(found))
    return [(mutant, case) for mutant, case in json.loads(file.read_text())]


def _begin() -> None:
    torch.set_num_threads(1)
    _ask_here()
    warm_up()


def _ask_here() -> None:
    """Ask engines for their capabilities in this process: these are our own, and a process for each takes a while."""
    patch.object(engines, "_ask", lambda engine, _: engines._answer(engine)).start()


@cache
def _session() -> TrialSession:
    return TrialSession(
        Source(folder=Path(tempfile.mkdtemp(prefix="shardproof-power-"))), RunOptions(locates=False)
    )


def _dies(pair: _Pair) -> bool:
    """Run one mutant on one row."""
    target, name, program = pair
    case = Case(id=name, training=training_of(program), laws=laws_of(program))
    cell = Cell(engine=target.engine, world=WorldSpec.parse(_WORLD))
    return _session().run(case, cell, suite="combinations", command="").verdict in target.verdicts


if __name__ == "__main__":
    main()
