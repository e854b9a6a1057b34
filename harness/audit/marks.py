"""The mutants that a case must kill, from its marks, and the pairs of mutant and case to run. No pytest here.

A test is marked with ``@pytest.mark.kills("SumsInsteadOfAveraging", ...)``; ``world="threads:4"`` selects one world,
and ``deadline_s=10`` ends mutants that hang. The name of a mutant is the last part of its engine's path:
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

# In the order of preference: a case runs in the first that suits it. Two ranks are the cheapest that
# communicate, four the fewest with two replicas of two, three give uneven shards; one rank cannot fail another.
# Processes are dear: they are for ranks that must share none.
WORLDS = ("threads:2", "threads:4", "threads:3", "threads:6", "threads:1", "processes:2")
_FILE = "mutants.json"
_SCHEMA = 1


class Breadth(Enum):
    """Which pairs of mutant and case are run."""

    MARKED = "marked"  # each case runs on the mutants that its marks name
    ONCE = "once"  # each mutant runs on the cheapest case whose marks name it; other cases do not run
    ALL = "all"  # each case runs on every mutant, and must kill those that its marks name


class PytestMark(Protocol):
    """The part of a pytest mark that is read here."""

    @property
    def name(self) -> str:
        """The name of the mark."""

    @property
    def args(self) -> tuple[Any, ...]:  # Any: whatever the suite wrote
        """The positional arguments."""

    @property
    def kwargs(self) -> Mapping[str, Any]:  # Any: as above
        """The keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MustKill:
    """One mutant that a case must kill, in ``world``; if that is empty, in the first world that suits the case.

    ``deadline_s`` is the deadline of the world in seconds, if it is not 0 and earlier than that of the run.
    """

    mutant: str
    world: str = ""
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCase:
    """The marks of a case: the mutants that it must kill, and the sizes of worlds that suit it."""

    id: str
    kills: frozenset[MustKill] = frozenset()
    sizes: tuple[Sizes, ...] = ()

    def suits(self, world: str) -> bool:
        """Whether the world has a size that suits the case."""
        return all(sizes.suits(WorldSpec.parse(world)) for sizes in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One mutant on one case in one world; ``must_kill`` is True if the case must kill it."""

    mutant: str
    case: str
    world: str
    must_kill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A case without a pair, and why."""

    case: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a session selected: pairs to run, pairs that need a device that is not here, and cases without a pair."""

    pairs: tuple[Pair, ...]
    elsewhere: tuple[Pair, ...] = ()
    idle: tuple[Idle, ...] = ()
    schema: int = _SCHEMA


def mutant_name(engine: str) -> str:
    """Return the name of an engine in marks."""
    return engine.rpartition(":")[2]


def kills_of(marks: Iterable[PytestMark], *, where: str) -> frozenset[MustKill]:
    """Read ``kills`` marks together; raises UsageError for a mark that cannot be read."""
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
    """Return the deadline of the mutant's world in seconds: the earliest of ``deadline_s`` and its marks."""
    return min(
        [deadline_s, *(kill.deadline_s for kill in kills if kill.mutant == mutant and kill.deadline_s)]
    )


def check_names(cases: Iterable[MarkedCase], known: Collection[str]) -> None:
    """Raise one UsageError for all names that are no mutants."""
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
    """Pair a case with mutants, each in the world that its mark names, else in the first that suits the case.

    A case that no world suits has no pairs.
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
    """Write the selection beside the run; several workers write the same."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _FILE, codec.write(selection, kind=None) + "\n")


def read_selection(folder: Path) -> Selection | None:
    """Read the selection; None if collection was interrupted."""
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
