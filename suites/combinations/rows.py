"""The rows of the covering arrays: read from the files beside this one, or made anew.

A line is `name: program  # notes`. Programs of an array have many choices, and the name stands for them in case ids; it
stays when other rows come and go. Without a name, as for the few choices of what an engine once failed, the program is
its own name. Notes are the mutants that a row kills, and entries of docs/what-it-found.md.

`python -m shardproof.suites.combinations.rows` keeps the rows that still make sense and adds those that are missing;
with `--anew` it keeps only those that have notes or expectations, and packs the others better. `--denser` adds programs
of many choices, as long as each has one in four hundred of all triples that no row has.
An array stays within the capabilities of a family of engines, because a row that asks for more proves nothing of them.
Each of the family's engines has every pair that it may run in rows that judge it: in none that asks for more than it
has, or contains a program that it is known to fail.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from hashlib import sha256
from pathlib import Path

from shardproof import Capability, Program, ProgramRule, Space
from shardproof.fixtures.programs.model import CUT
from shardproof.fixtures.programs.dimensions import LAYOUT
from shardproof.fixtures.programs.space import SPACE
from shardproof.harness.cases.covering_array import Triples, cover
from shardproof.harness.verdicts import known_failures_file
from shardproof.harness.verdicts.known_failures import matches

_HERE = Path(__file__).parent
_ONE_IN = 400  # triples, that a dense program must be the first to have
_REPLICAS = frozenset(
    {
        Capability.REPLICATE,
        Capability.BUCKETS,
        Capability.EDIT_GRADIENTS,
        Capability.COMPLEX,
        Capability.MIXED_DTYPES,
        Capability.MEMORY_FORMATS,
        Capability.SUM_OF_FORWARDS,
        Capability.ACCUMULATE,
        Capability.UNUSED,
        Capability.RANK_DEPENDENT,
        Capability.RANK_DEPENDENT_ORDER,
        Capability.RECOVER,
        Capability.RECOVER_KEEPING,
        Capability.CLIP,
        Capability.STATE,
        Capability.OWN_BUFFERS,
        Capability.LOSS_SCALE,
        Capability.PARAMETER_ORDER,
        Capability.PARAMETER_SHAPES,
        Capability.LOADED_WEIGHTS,
        Capability.LATE_PARAMETERS,
        Capability.START_FROM_FIRST,
    }
)
_WRAPPED = frozenset(
    {
        Capability.REPLICATE,
        Capability.SHARD,
        Capability.HYBRID,
        Capability.UNITS,
        Capability.RESHARD_POLICY,
        Capability.ACCUMULATE,
        Capability.REDUCE_DTYPE,
        Capability.CONVERT,
        Capability.CLIP,
        Capability.STATE,
        Capability.LOSS_SCALE,
        Capability.PARAMETER_ORDER,
        Capability.WRAPPER,
        Capability.LOADED_WEIGHTS,
        Capability.LATE_PARAMETERS,
        Capability.RANK_DEPENDENT_ORDER,
        Capability.START_FROM_FIRST,
        Capability.EDIT_GRADIENTS,
        Capability.IGNORE,
        Capability.COMPLEX,
        Capability.CPU_OFFLOAD,
        Capability.MIXED_DTYPES,
        Capability.MEMORY_FORMATS,
        Capability.SUM_OF_FORWARDS,
    }
)
# What engines that only shard optimizer state have beside the options of replicas, whose rows judge them too.
_OF_SHARES = frozenset({Capability.ZERO1, Capability.ZERO2})
_TUNED = frozenset(
    {
        Capability.OVERLAP,
        Capability.ROUND_ROBIN,
        Capability.CHECKPOINTS,
        Capability.RESIZED_CHECKPOINTS,
        Capability.OPTIMIZER_OFFLOAD,
        Capability.CLIP_IN_STEP,
    }
)
_SHARES = (
    _OF_SHARES
    | _TUNED
    | {
        Capability.ACCUMULATE,
        Capability.LOADED_WEIGHTS,
        Capability.LATE_PARAMETERS,
        Capability.PARAMETER_ORDER,
        Capability.RANK_DEPENDENT_ORDER,
        Capability.MIXED_DTYPES,
        Capability.MEMORY_FORMATS,
        Capability.SUM_OF_FORWARDS,
    }
)
OF_CUTS = frozenset({Capability.TENSOR_PARALLEL, Capability.EXPERTS})
_UNITS = (
    frozenset(Capability)
    - {Capability.WRAPPER, Capability.DATA_PARALLEL, Capability.START_FROM_FIRST, Capability.BUCKETS}
    - {Capability.MEMORY_FORMATS}
    - _OF_SHARES
    - _TUNED
)
FAMILIES: Mapping[str, frozenset[Capability]] = {
    "replicas": _REPLICAS,
    "wrapped": _WRAPPED,
    "units": _UNITS - OF_CUTS,
    "shares": _SHARES,
    "cut": _UNITS,  # of a model that a tensor-parallel axis has cut, on twice as many ranks
}

# Families whose rows contain every pair, and no triples for their own sake: a row on four ranks costs more.
OF_PAIRS_ALONE = frozenset({"cut"})

# The engines of this package that a family's rows judge, and what each lacks of its capabilities in any release.
ENGINES: Mapping[str, Mapping[str, frozenset[Capability]]] = {
    "replicas": {
        "torch.ddp": frozenset(),
        "torch.zero1": frozenset({Capability.COMPLEX, Capability.MIXED_DTYPES, Capability.REPLICATE}),
        "reference.zero2": _REPLICAS - _SHARES - {Capability.OWN_BUFFERS},
    },
    "wrapped": {
        "torch.fsdp1": frozenset(
            {
                Capability.COMPLEX,
                Capability.MEMORY_FORMATS,
                Capability.CPU_OFFLOAD,
                Capability.START_FROM_FIRST,
            }
        ),
        "reference.wrapper": frozenset(),
    },
    "units": {
        "torch.fsdp2": frozenset({Capability.REPLICATE}),
        "torch.replicate": frozenset(
            {
                Capability.SHARD,
                Capability.HYBRID,
                Capability.MIXED,
                Capability.REPLICA_SYNC,
                Capability.RESHARD_PART,
                Capability.RESHARD_POLICY,
                Capability.SHARD_DIM,
                Capability.GATHER_ONCE,
            }
        ),
        "reference": frozenset(),
    },
    "shares": {
        "torch.zero1": _TUNED | {Capability.MIXED_DTYPES, Capability.ZERO2},
        "reference.zero2": frozenset(),
    },
    "cut": {"torch.fsdp2": frozenset({Capability.REPLICATE}), "reference": frozenset()},
}

# Programs that an engine is known to fail judge it alone; larger ones judge the other engines.
ONCE_FAILED = {
    "found_units": "test_what_an_engine_once_failed",
    "found_wrapped": "test_what_a_wrapper_once_failed",
    "found_replicas": "test_what_replicas_once_failed",
    "found_shares": "test_what_shares_once_failed",
    "found_cut": "test_what_an_engine_of_cut_tensors_once_failed",
    "found_elsewhere": "test_what_replicas_of_other_libraries_once_failed",
}

# A row judges every engine that declares what it needs, except those that declare one of these: they have other rows.
WITH_OTHER_ROWS: Mapping[str, frozenset[Capability]] = {
    "replicas": frozenset(),
    "found_replicas": _OF_SHARES,  # by DDP, on which ZeRO-1 is built
    "wrapped": _OF_SHARES | {Capability.JOINT_UNITS},
    "units": _OF_SHARES | {Capability.WRAPPER},
    "shares": frozenset(),
    "cut": frozenset(),
}
_RULES_OF: Mapping[str, tuple[ProgramRule, ...]] = {
    "shares": (
        ProgramRule(
            why="another family has this layout", holds=lambda program: not program[LAYOUT].startswith("zero")
        ),
    ),
    "cut": (
        ProgramRule(
            why="another family has models that are not cut", holds=lambda program: program[CUT] == "no"
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a file: a program, its name if that is not its text, and the words after #."""

    program: Program
    name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The part of a case id that says which row it is."""
        return self.name or str(self.program)

    @property
    def mutants(self) -> list[str]:
        """The names of the mutants that the row kills."""
        return [note for note in self.notes if not note.isdigit()]

    def __str__(self) -> str:
        named = f"{self.name}: {self.program}" if self.name else str(self.program)
        return f"{named}  # {' '.join(self.notes)}" if self.notes else named


def rows_in(file: str) -> list[Row]:
    """Read the rows of a file; a line that begins with # is a comment."""
    lines = (line.partition("#") for line in (_HERE / f"{file}.txt").read_text().splitlines())
    return [_row(text.strip(), notes) for text, _, notes in lines if text.strip()]


def _row(text: str, notes: str) -> Row:
    name, _, program = text.rpartition(": ")
    return Row(program=SPACE.parse(program), name=name, notes=tuple(notes.split()))


def array(spaces: Iterable[Space], rows: Iterable[Row], known: Sequence[Row] = ()) -> list[Row]:
    """Return the rows that make sense in the last space, as they are, and named rows for what they lack in each.

    What the rows ``known`` have is not lacking.
    """
    each = tuple(spaces)
    kept = within(each[-1], rows)
    for space in each:
        kept = [*kept, *(Row(program=p, name=_name(p)) for p in lacking(space, [*kept, *known]))]
    return kept


def lacking(space: Space, rows: Iterable[Row]) -> Iterator[Program]:
    """Yield programs of a space for the combinations that make sense and are in none of these rows."""
    seen = (space.combinations_in(row.program) for row in within(space, rows))
    return cover(space, unseen=space.combinations.difference(*seen))


def dense(family: str, rows: Sequence[Row]) -> list[Row]:
    """Return named rows with triples of choices that these have not, and no program that is known to fail."""
    space = undisputed(family)
    triples = Triples(space, (row.program for row in within(space, rows)))
    return [Row(program=p, name=_name(p)) for p in triples.denser(least=triples.number // _ONE_IN)]


def within(space: Space, rows: Iterable[Row]) -> list[Row]:
    """Return the rows that make sense in a space, in order."""
    return [row for row in rows if space.has(row.program) and space.makes_sense(row.program)]


def _name(program: Program) -> str:
    return sha256(str(program).encode()).hexdigest()[:8]


def spaces_of(family: str) -> Mapping[str, Space]:
    """Return the spaces of a family's array: by name what each engine may run, at last what any engine may.

    An engine's has no program that it is known to fail, so that no failure hides another. Of the first engine, whose
    rows are most, and of all together the triples that interact count too, of the others pairs.
    """
    of_engines = {
        engine: _space_of(family, FAMILIES[family] - lacked).without(_failed_by(engine))
        for engine, lacked in ENGINES[family].items()
    }
    first, *others = of_engines
    return {
        first: of_engines[first],
        **{engine: _of_pairs(of_engines[engine]) for engine in others},
        "any": _space_of(family, FAMILIES[family]),
    }


def undisputed(family: str) -> Space:
    """Return the space of the programs that no engine of a family is known to fail."""
    return _space_of(family, FAMILIES[family]).without({p for e in ENGINES[family] for p in _failed_by(e)})


def _space_of(family: str, has: frozenset[Capability]) -> Space:
    space = SPACE.within(has)
    space = replace(space, rules=(*space.rules, *_RULES_OF.get(family, ())))
    return _of_pairs(space) if family in OF_PAIRS_ALONE else space


def _of_pairs(space: Space) -> Space:
    return replace(space, dimensions=tuple(replace(d, interacts=False) for d in space.dimensions))


@cache
def _failed_by(engine: str) -> tuple[Program, ...]:
    """Return the programs that some release of an engine is known to fail.

    Those of found_elsewhere.txt stand in rows, because the newest release passes them.
    """
    cases = [pattern for name, pattern in _expected() if name == engine]
    return tuple(
        row.program
        for file in ONCE_FAILED.keys() - {"found_elsewhere"}
        for row in rows_in(file)
        if any(matches(pattern, case_of(file, row)) for pattern in cases)
    )


def case_of(file: str, row: Row) -> str:
    """Return the case that judges a row of a file of programs that an engine once failed."""
    return f"{_HERE.name}/test_programs.py::{ONCE_FAILED[file]}[{row.id}]"


def _needed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that a note or an expectation is about."""
    return [row for row in rows if row.notes or has_expectation(row)]


def has_expectation(row: Row) -> bool:
    """Return whether some engine is known to fail the row."""
    return any(f"[{row.id}]" in pattern for _, pattern in _expected())


@cache
def _expected() -> tuple[tuple[str, str], ...]:
    """Return the engine and the pattern of cases of each known failure."""
    known = known_failures_file.read(known_failures_file.SHIPPED, today=date.max)
    return tuple((entry.engine, entry.case) for entry in known.entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anew", action="store_true", help="keep only rows with notes or expectations")
    parser.add_argument("--denser", action="store_true", help="add programs with unseen triples of choices")
    asked = parser.parse_args()
    for family in FAMILIES:
        before = rows_in(family)
        spaces = spaces_of(family).values()
        rows = array(spaces, _needed(before) if asked.anew else before, rows_in(f"found_{family}"))
        is_denser = asked.denser and family not in OF_PAIRS_ALONE
        rows += dense(family, [*rows, *rows_in(f"found_{family}")]) if is_denser else []
        (_HERE / f"{family}.txt").write_text("".join(f"{row}\n" for row in rows))
        for lost in (row for row in _needed(before) if row not in rows):
            print(f"{family}: a row with notes or expectations makes no sense any more: {lost}")


if __name__ == "__main__":
    main()
