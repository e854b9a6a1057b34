"""The rows of the covering arrays: read from the files beside this one, or made anew.

A line is `name: program  # notes`. Programs of an array have many choices, and the name stands for them in case ids; it
stays when other rows come and go. Without a name, as for the few choices of what an engine once failed, the program is
its own name. Notes are the mutants that a row kills, and entries of docs/what-it-found.md.

`python -m shardproof.suites.combinations.rows` keeps the rows that still make sense and adds those that are missing;
with `--anew` it keeps only those that have notes or expectations, and packs the others better. `--denser` adds programs
of many choices, as long as each has one in four hundred of all triples that no row has.
An array stays within the capabilities of a family of engines, because a row that asks for more proves nothing of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

from shardproof import Capability, Program, ProgramRule, Space
from shardproof.fixtures.programs.model import CUT
from shardproof.fixtures.programs.dimensions import LAYOUT
from shardproof.fixtures.programs.space import SPACE
from shardproof.harness.cases.covering_array import Triples, cover
from shardproof.harness.cases.space import Dimension

_HERE = Path(__file__).parent
_ONE_IN = 400  # triples, that a dense program must be the first to have
# Some engines of replicas lack these.
_OF_SOME_REPLICAS = frozenset(
    {
        Capability.REPLICATE,
        Capability.BUCKETS,
        Capability.EDIT_GRADIENTS,
        Capability.COMPLEX,
        Capability.MIXED_DTYPES,
        Capability.SUM_OF_FORWARDS,
    }
)
_REPLICAS = _OF_SOME_REPLICAS | frozenset(
    {
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
        Capability.RANK_DEPENDENT_ORDER,
        Capability.START_FROM_FIRST,
        Capability.EDIT_GRADIENTS,
        Capability.IGNORE,
        Capability.COMPLEX,
        Capability.CPU_OFFLOAD,
        Capability.MIXED_DTYPES,
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
        Capability.PARAMETER_ORDER,
        Capability.RANK_DEPENDENT_ORDER,
        Capability.MIXED_DTYPES,
        Capability.SUM_OF_FORWARDS,
    }
)
OF_CUTS = frozenset({Capability.TENSOR_PARALLEL, Capability.EXPERTS})
_UNITS = (
    frozenset(Capability)
    - {Capability.WRAPPER, Capability.DATA_PARALLEL, Capability.START_FROM_FIRST, Capability.BUCKETS}
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

# Of a family's capabilities those that some of its engines lack: their own rows contain every pair too.
LACKED = {
    "replicas": _OF_SOME_REPLICAS,
    "wrapped": frozenset({Capability.COMPLEX, Capability.CPU_OFFLOAD, Capability.START_FROM_FIRST}),
    "units": frozenset({Capability.REPLICATE}),
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
# Families whose engines are judged by the rows of another one too, so that these contain none of their known failures.
_JUDGED_TOO: Mapping[str, tuple[str, ...]] = {
    "replicas": ("wrapped", "units"),
    "wrapped": ("replicas",),
    "units": ("replicas",),
    "cut": ("units", "replicas"),
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


def array(spaces: Sequence[Space], rows: Iterable[Row], known: Sequence[Row] = ()) -> list[Row]:
    """Return the rows that make sense in the last space, as they are, and named rows for what they lack in each.

    What the rows ``known`` have is not lacking.
    """
    kept = within(spaces[-1], rows)
    for space in spaces:
        kept = [*kept, *(Row(program=p, name=_name(p)) for p in lacking(space, [*kept, *known]))]
    return kept


def lacking(space: Space, rows: Iterable[Row]) -> Iterator[Program]:
    """Yield programs of a space for the combinations that make sense and are in none of these rows."""
    seen = (space.combinations_in(row.program) for row in within(space, rows))
    return cover(space, unseen=space.combinations.difference(*seen))


def dense(family: str, rows: Sequence[Row]) -> list[Row]:
    """Return named rows with triples of choices that these have not, and with no program that is known to fail."""
    space = spaces_of(family)[1]
    triples = Triples(space, (row.program for row in within(space, rows)))
    return [Row(program=p, name=_name(p)) for p in triples.denser(least=triples.number // _ONE_IN)]


def within(space: Space, rows: Iterable[Row]) -> list[Row]:
    """Return the rows that make sense in a space, in order."""
    return [row for row in rows if space.has(row.program) and space.makes_sense(row.program)]


def _name(program: Program) -> str:
    return sha256(str(program).encode()).hexdigest()[:8]


def spaces_of(family: str) -> tuple[Space, ...]:
    """Return the spaces of a family's array, each wider than the one before.

    The first two have no program that one of the family's engines is known to fail, so that no failure hides another:
    that of the engines that lack something, and of the others. In the last one such programs judge the engines that
    do not fail them.
    """
    others = (family, *_JUDGED_TOO.get(family, ()))
    known = tuple(
        ProgramRule(
            why=f"contains {row.program}, of found_{other}.txt", holds=partial(_is_known, other, row.program)
        )
        for other in others
        for row in rows_in(f"found_{other}")
    )
    return (
        _space_of(family, known, lacked=LACKED.get(family, frozenset())),
        _space_of(family, known),
        _space_of(family),
    )


def _space_of(
    family: str, rules: tuple[ProgramRule, ...] = (), *, lacked: frozenset[Capability] = frozenset()
) -> Space:
    space = SPACE.within(FAMILIES[family] - lacked)
    if family in OF_PAIRS_ALONE:
        space = replace(space, dimensions=tuple(replace(d, interacts=False) for d in space.dimensions))
    return replace(space, rules=(*space.rules, *rules, *_RULES_OF.get(family, ())))


def _is_known(family: str, found: Program, program: Program) -> bool:
    return program.contains(found) and all(program[d] != value for d, value in _values_beyond(family))


@cache
def _values_beyond(family: str) -> tuple[tuple[Dimension, str], ...]:
    """Return the values that need more than a family has, whose programs other rows judge."""
    has = FAMILIES[family] | OF_CUTS
    return tuple((d, value) for d in SPACE.dimensions for value, needs in d.demands if not needs <= has)


def _needed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that a note or an expectation is about."""
    return [row for row in rows if row.notes or has_expectation(row)]


def has_expectation(row: Row) -> bool:
    """Return whether some engine is known to fail the row."""
    return f"[{row.id}]" in _expectations()


@cache
def _expectations() -> str:
    return (_HERE.parent / "known_failures.toml").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anew", action="store_true", help="keep only rows with notes or expectations")
    parser.add_argument("--denser", action="store_true", help="add programs with unseen triples of choices")
    asked = parser.parse_args()
    for family in FAMILIES:
        before = rows_in(family)
        rows = array(spaces_of(family), _needed(before) if asked.anew else before, rows_in(f"found_{family}"))
        is_denser = asked.denser and family not in OF_PAIRS_ALONE
        rows += dense(family, [*rows, *rows_in(f"found_{family}")]) if is_denser else []
        (_HERE / f"{family}.txt").write_text("".join(f"{row}\n" for row in rows))
        for lost in (row for row in _needed(before) if row not in rows):
            print(f"{family}: a row with notes or expectations makes no sense any more: {lost}")


if __name__ == "__main__":
    main()
