"""Case ids: the parts of a pytest node id, and the inventory of all cases in the suites."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardproof.harness.errors import UsageError

_CELL = re.compile(r"\[(?P<engine>.+)@(?P<world>[a-z]+:\d+(?::[a-z]+)?)(?:-(?P<rest>.*))?\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One case in one cell, in pytest's spelling: ``suites/parity/test_x.py::test_y[ENGINE@WORLD-rest]``."""

    nodeid: str
    engine: str
    world: str
    case: str  # parity/test_x.py::test_y[rest]
    suite: str

    @classmethod
    def parse(cls, nodeid: str) -> Node | None:
        """Parse a node id; None for a test that judges no engine."""
        match = _CELL.search(nodeid)
        if match is None:
            return None
        stem = _below_suites(nodeid[: match.start()])
        rest = f"[{match['rest']}]" if match["rest"] else ""
        suite = stem.split("/")[0] if "/" in stem else ""
        return cls(nodeid=nodeid, engine=match["engine"], world=match["world"], case=stem + rest, suite=suite)

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of this case's record."""
        return (self.engine, self.case, self.world)

    @property
    def command(self) -> str:
        """The command that reruns this case: from any folder for our suites, else from where pytest was called."""
        where = ("--engine", self.engine, "--world", self.world)
        if (SUITES / self.case.partition("::")[0]).is_file():
            return shlex.join(["shardproof", "run", "--case", self.case, *where])
        return shlex.join(["pytest", "-p", "shardproof.harness.runner.plugin", self.nodeid, *where])


def check_command(model: str, node: Node) -> str:
    """Return the command that repeats a case on a user's model, for all of the case's parameters."""
    function = node.case.rpartition("::")[2].partition("[")[0]
    where = ("--engine", node.engine, "--world", node.world)
    return shlex.join(["shardproof", "check", model, *where, "-k", function])


SUITES = Path(__file__).resolve().parents[2] / "suites"


def _below_suites(stem: str) -> str:
    """Remove the path by which pytest was called from the id of one of our files."""
    inner = stem.rpartition("suites/")[2]
    return inner if (SUITES / inner.partition("::")[0]).is_file() else stem.removeprefix("suites/")


def node_of(case: str, engine: str, world: str) -> str:
    """Return pytest's node id of a case of our suites in one cell, for its command line."""
    stem, _, parameters = case.partition("[")
    rest = f"-{parameters.removesuffix(']')}" if parameters else ""
    return f"{SUITES}/{stem}[{engine}@{world}{rest}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The ids of the cases that a session collected, including those that fit no world of the session.

    ``is_whole``: every file of the suites was collected, and no case was left out by its name, its marks or its path.
    ``is_sharded``: other runs run the remaining cases.
    """

    cases: frozenset[str] = frozenset()
    is_whole: bool = False
    is_sharded: bool = False

    def narrowed(self) -> Catalogue:
        """Return the same cases, marked as a selection."""
        return replace(self, is_whole=False)


def files() -> frozenset[str]:
    """List the files that contain cases, in the spelling of case ids."""
    return frozenset(file.relative_to(SUITES).as_posix() for file in SUITES.rglob("test_*.py"))


def refuse_unknown_words(keyword: str, suite: Path, others: Iterable[str]) -> None:
    """Raise UsageError for a word of a -k expression that is in no name of a suite's cases, nor in the others."""
    sources = {file: file.read_text() for file in suite.glob("test_*.py")}
    functions = [
        name for source in sources.values() for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)
    ]
    known = [*functions, *(str(file) for file in sources), *others]
    for word in re.findall(r"[^\s()]+", keyword):
        if word in {"and", "or", "not"} or any(word.lower() in name.lower() for name in known):
            continue
        parts = {part for name in functions for part in name.removeprefix("test_").split("_")}
        near = difflib.get_close_matches(word, sorted(parts), n=1)
        hint = (
            f"-k {near[0]}"
            if near
            else f"one of {', '.join(name.removeprefix('test_') for name in functions)}"
        )
        raise UsageError("-k", expected="parts of the names of cases", got=repr(word), hint=hint)


def collected(nodeids: Iterable[str], arguments: Sequence[str]) -> Catalogue:
    """Return the collected cases, from pytest's node ids and the arguments that it was called with."""
    found = list(nodeids)
    cases = frozenset(node.case for nodeid in found if (node := Node.parse(nodeid)))
    seen = {nodeid.partition("::")[0].removeprefix("suites/") for nodeid in found}
    is_named = any("::" in argument for argument in arguments)
    return Catalogue(cases=cases, is_whole=not is_named and files() <= seen)
