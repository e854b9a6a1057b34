"""How many mutants of pairs die of the cases written by hand, of the rows of combinations, and of programs drawn.

Each of these mutants is wrong only where two ordinary things meet. Run:
``python -m campaigns.rare_triggers [--programs 60] [--seed 1] [--catalogue] [--mutants N] [--markdown]``
``--catalogue`` runs all other suites for each mutant until a case fails that the reference engine passes, which takes
minutes for one that survives. ``--mutants`` takes N of them, drawn by the seed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from tabulate import tabulate

from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.mutants.mutant import Mutant
from shardproof.fixtures.programs.laws import laws_of
from shardproof.fixtures.programs.space import SPACE, space_of
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.cases.covering_array import cover
from shardproof.harness.cases.space import Program
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.engines import describe
from shardproof.harness.runner.exploration import Exploration
from shardproof.harness.runner.invoke import suite_folders
from shardproof.harness.worlds.processes.forkserver import warm_up
from shardproof.harness.worlds.spec import WorldSpec
from shardproof.suites.combinations.rows import FAMILIES, rows_in

_WORLD = "threads:2"
_FEWEST = 20  # at least this many records in a run of all suites
_LEAST = {Verdict.FAILED, Verdict.CRASHED, Verdict.HUNG}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--catalogue", action="store_true")
    parser.add_argument("--mutants", type=int)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    space = space_of(describe("reference").capabilities, WorldSpec.parse(_WORLD).size)
    seed = random.Random(arguments.seed).randrange(2**32)  # as explore draws it
    programs = list(islice(cover(space, seed, unseen=space.combinations), arguments.programs))
    noted = {name for family in FAMILIES for row in rows_in(family) for name in row.mutants}
    rows = []
    if arguments.catalogue and (killer := _killer("reference")):
        raise SystemExit(f"expected that the honest engine passes, it fails {killer}")
    for mutant in _mutants(arguments.mutants, arguments.seed):
        started = time.monotonic()
        first = _first_that_fails(mutant.engine_spec, programs)
        row = {"mutant": mutant.name}
        if arguments.catalogue:
            row["catalogue by hand"] = _killer(mutant.engine_spec) or "survives"
        row |= {"combinations": "killed" if mutant.name in noted else "survives"}
        row |= {"explore": "survives" if first is None else f"program {first}"}
        print(f"{row} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        rows.append(row)
    print(tabulate(rows, headers="keys", tablefmt="pipe" if arguments.markdown else "simple"))
    seen: set[frozenset[tuple[str, str]]] = set()
    for number, program in enumerate(programs, start=1):
        seen |= space.combinations_in(program)
        if number in {1, 3, 10, 30, 60, 100, len(programs)}:
            print(f"{number} programs: {len(seen)} of {len(space.combinations)} combinations")


_MODULES = ("shardproof.engine.mutants.rare_triggers:", "shardproof.engine.mutants.rare_moves:")


def _first_that_fails(engine: str, programs: Sequence[Program]) -> int | None:
    """Return the number of the first program that a mutant fails."""
    cell = Cell(engine=engine, world=WorldSpec.parse(_WORLD))
    exploration = Exploration(space=SPACE, training=training_of, laws=laws_of, cell=cell)
    verdicts = (exploration.judge(program).verdict for program in programs)
    return next((i for i, verdict in enumerate(verdicts, start=1) if verdict in _LEAST), None)


def _mutants(most: int | None, seed: int) -> list[Mutant]:
    pairs = [m for m in MUTANTS if m.engine_spec.startswith(_MODULES)]
    found = [m for m in pairs if not m.name.startswith("HalvesTheLastRank")]
    return found if most is None else random.Random(seed).sample(found, most)


def _killer(engine: str) -> str:
    """Return a case of the other suites that fails, empty if none does."""
    suites = [str(folder) for folder in suite_folders() if folder.name != "combinations"]
    with tempfile.TemporaryDirectory() as out:
        where = ["--engine", engine, "--world", _WORLD, "--no-expectations", "--out", out, "-x", "-q"]
        command = [sys.executable, "-m", "pytest", *suites, *where]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        records = read_run(Path(out)).records
    if len(records) < _FEWEST:
        raise SystemExit(f"{engine}: expected records of the catalogue, got {len(records)}")
    return next((record.case for record in records if record.verdict in _LEAST), "")


if __name__ == "__main__":
    main()
