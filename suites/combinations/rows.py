"""The rows of the covering arrays: read from the files beside this one, or made anew.

`python -m shardproof.suites.combinations.rows` writes the files, the same on every machine.
An array stays within the capabilities of a family of engines, because a row that asks for more proves nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shardproof import Capability, Program, Space
from shardproof.fixtures.programs import SPACE

__all__ = ["FAMILIES", "programs_in", "rows_in", "space_of"]

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
        Capability.WRAPPER,
    }
)
FAMILIES: Mapping[str, frozenset[Capability]] = {
    "replicas": _REPLICAS,
    "wrapped": _WRAPPED,
    "units": frozenset(Capability) - {Capability.WRAPPER},
}


def programs_in(name: str) -> list[Program]:
    """Read the programs of a file, one a line; what follows # is a comment."""
    return [program for program, _ in rows_in(name)]


def rows_in(name: str) -> list[tuple[Program, str]]:
    """Read the programs of a file with what follows #: the mutants that a row kills."""
    lines = (line.partition("#") for line in (_HERE / f"{name}.txt").read_text().splitlines())
    return [(SPACE.parse(text.strip()), note.strip()) for text, _, note in lines if text.strip()]


def space_of(family: str) -> Space:
    """Return what a family's array covers: no program in it contains one that some engine is known to fail."""
    files = [file for file in ("found", f"found_{family}") if (_HERE / f"{file}.txt").exists()]
    return SPACE.within(FAMILIES[family]).without(program for file in files for program in programs_in(file))


def _write(families: Iterable[str]) -> None:
    for family in families:
        rows = space_of(family).cover()
        (_HERE / f"{family}.txt").write_text("".join(f"{row}\n" for row in rows))


if __name__ == "__main__":
    _write(FAMILIES)
