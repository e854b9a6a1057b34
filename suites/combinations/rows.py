"""The rows of the covering arrays: read from the files beside this one, or made anew.

`python -m shardproof.suites.combinations.rows` keeps the rows that still make sense and adds those that are missing.
An array stays within the capabilities of a family of engines, because a row that asks for more proves nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from shardproof import Capability, Program, ProgramRule, Space
from shardproof.fixtures.program_space import LAYOUT, SPACE

__all__ = ["FAMILIES", "JUDGED_WITH", "programs_in", "rows_in", "space_of"]

_HERE = Path(__file__).parent
_REPLICAS = frozenset(
    {
        Capability.REPLICATE,
        Capability.ACCUMULATE,
        Capability.UNUSED,
        Capability.RANK_DEPENDENT,
        Capability.RECOVER,
        Capability.RECOVER_KEEPING,
        Capability.CLIP,
        Capability.STATE,
        Capability.OWN_BUFFERS,
        Capability.LOSS_SCALE,
    }
)
_WRAPPED = frozenset(
    {
        Capability.REPLICATE,
        Capability.SHARD,
        Capability.UNITS,
        Capability.RESHARD_POLICY,
        Capability.ACCUMULATE,
        Capability.REDUCE_DTYPE,
        Capability.CONVERT,
        Capability.CLIP,
        Capability.STATE,
        Capability.LOSS_SCALE,
        Capability.WRAPPER,
    }
)
# The options that all engines that shard optimizer state may have: most would refuse a row with more.
_SHARES = frozenset({Capability.ZERO1, Capability.ZERO2, Capability.ACCUMULATE})
FAMILIES: Mapping[str, frozenset[Capability]] = {
    "replicas": _REPLICAS,
    "wrapped": _WRAPPED,
    "units": frozenset(Capability)
    - {Capability.WRAPPER, Capability.DATA_PARALLEL, Capability.ZERO1, Capability.ZERO2},
    "shares": _SHARES,
}


# The capabilities that distinguish a family's engines, which alone judge its rows. Rows of shares do by their layouts.
JUDGED_WITH: Mapping[str, Capability] = {
    "replicas": Capability.REPLICATE,
    "wrapped": Capability.WRAPPER,
    "units": Capability.JOINT_UNITS,  # not UNIT_SYNC, with which memory is not counted
}

_RULES_OF: Mapping[str, tuple[ProgramRule, ...]] = {
    "shares": (
        ProgramRule(
            why="another family has this layout", holds=lambda program: not program[LAYOUT].startswith("zero")
        ),
    )
}


def programs_in(name: str) -> list[Program]:
    """Read the programs of a file, one per line; text after # is a comment."""
    return [program for program, _ in rows_in(name)]


def rows_in(name: str) -> list[tuple[Program, str]]:
    """Read the programs of a file with the text after #: the mutants that a row kills."""
    lines = (line.partition("#") for line in (_HERE / f"{name}.txt").read_text().splitlines())
    return [(SPACE.parse(text.strip()), note.strip()) for text, _, note in lines if text.strip()]


def space_of(family: str) -> Space:
    """Return the space of a family's array: without combinations that one of its engines is known to fail."""
    others = [other for other in FAMILIES if other == family or JUDGED_WITH.get(family) in FAMILIES[other]]
    rules = tuple(
        ProgramRule(why=f"contains one of found_{other}.txt", holds=partial(_is_known, other))
        for other in others
    )
    space = SPACE.within(FAMILIES[family])
    return replace(space, rules=(*space.rules, *rules, *_RULES_OF.get(family, ())))


def _is_known(family: str, program: Program) -> bool:
    known = _found(family)
    return SPACE.needs(program) <= FAMILIES[family] and any(program.contains(found) for found in known)


@cache
def _found(family: str) -> tuple[Program, ...]:
    return tuple(programs_in(f"found_{family}"))


def _write(families: Iterable[str]) -> None:
    """Keep the rows that are still valid, with their notes, and add rows for combinations that they do not cover."""
    for family in families:
        space = space_of(family)
        kept = [
            (row, note)
            for row, note in rows_in(family)
            if space.has(row) and space.contradiction(row) is None
        ]
        left = space.combinations.difference(*(space.combinations_in(row) for row, _ in kept))
        rows = [*kept, *((row, "") for row in space.cover(unseen=left))]
        text = "".join(f"{row}  # {note}\n" if note else f"{row}\n" for row, note in rows)
        (_HERE / f"{family}.txt").write_text(text)


if __name__ == "__main__":
    _write(FAMILIES)
