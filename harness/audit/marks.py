"""The mutants that a case must kill, as its marks say, and the pairs of mutant and case to run. No pytest here.

A suite's test says ``@pytest.mark.kills("SumsInsteadOfAveraging", ...)``; ``world="threads:4"`` there asks in one world
alone, and ``deadline_s=10`` ends mutants that hang. A mutant goes by the last name of its engine:
``engine.mutants.gradient_scale:SumsInsteadOfAveraging``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from shardproof.harness.errors import UsageError
from shardproof.harness.records.run import write_file
from shardproof.harness.tracing import codec
from shardproof.harness.worlds.spec import Sizes, WorldSpec

# In the order of preference: a case is asked in the first that it makes sense in. Two ranks are the cheapest that
# communicate, four the fewest with two replicas of two, three give uneven shards; one rank cannot fail another.
# Processes are dear: they are for ranks that must share none.
WORLDS = ("threads:2", "threads:4", "threads:3", "threads:6", "threads:1", "processes:2")
_FILE = "mutants.json"
_SCHEMA = 1


class Breadth(Enum):
    """Which pairs of mutant and case are run."""

    MARKED = "marked"  # each case meets the mutants that its marks name
    ONCE = "once"  # each mutant meets one of the cases whose marks name it, the first; other cases meet none
    ALL = "all"  # each case meets every mutant; those that its marks name it must kill


class PytestMark(Protocol):
    """What is needed of a pytest mark."""

    @property
    def name(self) -> str:
        """Which mark it is."""

    @property
    def args(self) -> tuple[Any, ...]:  # Any: whatever the suite wrote
        """What the mark was given by position."""

    @property
    def kwargs(self) -> Mapping[str, Any]:  # Any: as above
        """What the mark was given by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MustKill:
    """One mutant that a case must kill; in ``world``, or where that is empty, in the first that suits the case.

    The world ends after ``deadline_s``, where that is not 0 and the run's own deadline is later.
    """

    mutant: str
    world: str = ""
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCase:
    """A case as its marks tell: what it must kill, and the worlds that it makes sense for."""

    id: str
    kills: frozenset[MustKill] = frozenset()
    sizes: tuple[Sizes, ...] = ()

    def suits(self, world: str) -> bool:
        """Whether the case makes sense in this world."""
        return all(sizes.suits(WorldSpec.parse(world)) for sizes in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One mutant on one case in one world; ``must_kill`` tells that the case must kill it."""

    mutant: str
    case: str
    world: str
    must_kill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A case that meets no mutant, and why."""

    case: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a session selected to run: pairs, pairs that need a device which is not here, and cases without any."""

    pairs: tuple[Pair, ...]
    elsewhere: tuple[Pair, ...] = ()
    idle: tuple[Idle, ...] = ()
    schema: int = _SCHEMA


def mutant_name(engine: str) -> str:
    """Return the name by which marks call an engine."""
    return engine.rpartition(":")[2]


def kills_of(marks: Iterable[PytestMark], *, where: str) -> frozenset[MustKill]:
    """Read ``kills`` marks, all of them together; raises UsageError for one that cannot be read."""
    found: set[MustKill] = set()
    for mark in marks:
        names, world, deadline_s = mark.args, mark.kwargs.get("world", ""), mark.kwargs.get("deadline_s", 0.0)
        is_spelt = names and all(isinstance(text, str) for text in (*names, world))
        is_timed = isinstance(deadline_s, int | float) and deadline_s >= 0
        if not (is_spelt and is_timed) or set(mark.kwargs) - {"world", "deadline_s"}:
            given = ", ".join([*map(repr, names), *(f"{k}={v!r}" for k, v in mark.kwargs.items())])
            raise UsageError(
                f"the kills mark of {where}",
                expected="names of mutants, and perhaps world= and deadline_s=",
                got=f"kills({given})",
                hint='@pytest.mark.kills("SumsInsteadOfAveraging", world="threads:4")',
            )
        if world:
            WorldSpec.parse(world)
        found |= {MustKill(mutant=name, world=world, deadline_s=deadline_s) for name in names}
    return frozenset(found)


def deadline_of(mutant: str, kills: Iterable[MustKill], deadline_s: float) -> float:
    """Return how long a world of the mutant may take: as long as a mark allows, and at most ``deadline_s``."""
    return min(
        [deadline_s, *(kill.deadline_s for kill in kills if kill.mutant == mutant and kill.deadline_s)]
    )


def check_names(cases: Iterable[MarkedCase], known: Collection[str]) -> None:
    """Raise UsageError for a name that is no mutant, all of it at once."""
    unknown: dict[str, str] = {}  # with the first case that names it
    for case in cases:
        for name in sorted({kill.mutant for kill in case.kills} - set(known)):
            unknown.setdefault(name, case.id)
    if unknown:
        near = [n for name in unknown for n in difflib.get_close_matches(name, known, n=1, cutoff=0.4)]
        raise UsageError(
            f"the kills mark of {', '.join(dict.fromkeys(unknown.values()))}",
            expected="names of mutants",
            got=", ".join(map(repr, unknown)),
            hint=" or ".join(map(repr, dict.fromkeys(near))) or "names from engine/mutants",
        )


def pairs(
    case: MarkedCase, mutants: Sequence[str], worlds: Sequence[str], breadth: Breadth
) -> tuple[Pair, ...]:
    """Pair a case with mutants, each in the first world that suits the case unless its mark asks for another.

    No pair comes of a case that none of the worlds suits.
    """
    first = next((world for world in worlds if case.suits(world)), None)
    found = []
    for mutant in mutants:
        marks = [kill for kill in case.kills if kill.mutant == mutant]
        asked = sorted({kill.world for kill in marks if kill.world})
        for world in asked:
            _refuse_unsuited(case, world)
        if marks or breadth is Breadth.ALL:
            places = asked or ([first] if first else [])
            found += [Pair(mutant=mutant, case=case.id, world=w, must_kill=bool(marks)) for w in places]
    return tuple(found)


def write_selection(folder: Path, selection: Selection) -> None:
    """Write what was selected beside the run; several workers write the same."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _FILE, codec.write(selection, kind=None) + "\n")


def read_selection(folder: Path) -> Selection | None:
    """Read what was selected; None where collecting never came to its end."""
    file = folder / _FILE
    if not file.exists():
        return None
    return codec.read(Selection, file.read_text(), where=str(file), newest=_SCHEMA, kind=None)


def _refuse_unsuited(case: MarkedCase, world: str) -> None:
    if not case.suits(world):
        raise UsageError(
            f"the kills mark of {case.id}",
            expected=f"a world for {' and '.join(sizes.name for sizes in case.sizes)}, as its worlds mark says",
            got=f"world={world!r}",
            hint="another world, or none",
        )
