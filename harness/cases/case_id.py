"""Case ids: what a pytest node id says of a case, and the inventory of all cases that the suites hold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_CELL = re.compile(r"\[(?P<engine>.+)@(?P<world>[a-z]+:\d+(?::[a-z]+)?)(?:-(?P<rest>.*))?\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One case in one cell, as pytest spells it: ``suites/parity/test_x.py::test_y[ENGINE@WORLD-rest]``."""

    nodeid: str
    engine: str
    world: str
    case: str  # parity/test_x.py::test_y[rest]
    suite: str

    @classmethod
    def parse(cls, nodeid: str) -> Node | None:
        """Read a node id; None for a test that judges no engine."""
        match = _CELL.search(nodeid)
        if match is None:
            return None
        stem = _below_suites(nodeid[: match.start()])
        rest = f"[{match['rest']}]" if match["rest"] else ""
        suite = stem.split("/")[0] if "/" in stem else ""
        return cls(nodeid=nodeid, engine=match["engine"], world=match["world"], case=stem + rest, suite=suite)

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the record of this case."""
        return (self.engine, self.case, self.world)

    @property
    def command(self) -> str:
        """The command that repeats this one case: of our suites from any folder, else from where pytest was called."""
        where = ("--engine", self.engine, "--world", self.world)
        if (SUITES / self.case.partition("::")[0]).is_file():
            return shlex.join(["shardproof", "run", "--case", self.case, *where])
        return shlex.join(["pytest", "-p", "shardproof.harness.runner.plugin", self.nodeid, *where])


SUITES = Path(__file__).resolve().parents[2] / "suites"


def _below_suites(stem: str) -> str:
    """Leave out how pytest came to one of our files: by a path from wherever it was called."""
    inner = stem.rpartition("suites/")[2]
    return inner if (SUITES / inner.partition("::")[0]).is_file() else stem.removeprefix("suites/")


def node_of(case: str, engine: str, world: str) -> str:
    """Return what pytest calls a case of our suites in one cell, for its command line."""
    stem, _, parameters = case.partition("[")
    rest = f"-{parameters.removesuffix(']')}" if parameters else ""
    return f"{SUITES}/{stem}[{engine}@{world}{rest}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The ids of the cases that a session collected, those included that no world of the session suits.

    ``is_whole``: these are all there are; every file of the suites was collected, and no case was
    left out by its name, its marks or its place. ``is_sharded``: other runs run the rest of them.
    """

    cases: frozenset[str] = frozenset()
    is_whole: bool = False
    is_sharded: bool = False

    def narrowed(self) -> Catalogue:
        """The same cases, known to be a selection."""
        return replace(self, is_whole=False)


def files() -> frozenset[str]:
    """List the files that hold cases, as their ids name them."""
    return frozenset(file.relative_to(SUITES).as_posix() for file in SUITES.rglob("test_*.py"))


def collected(nodeids: Iterable[str], arguments: Sequence[str]) -> Catalogue:
    """Return from pytest's node ids, and from the arguments that it was called with, what was collected."""
    found = list(nodeids)
    cases = frozenset(node.case for nodeid in found if (node := Node.parse(nodeid)))
    seen = {nodeid.partition("::")[0].removeprefix("suites/") for nodeid in found}
    is_named = any("::" in argument for argument in arguments)
    return Catalogue(cases=cases, is_whole=not is_named and files() <= seen)
