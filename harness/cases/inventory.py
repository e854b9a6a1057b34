"""The catalogue: every case that the suites hold, and whether a session collected all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cases.case_id import Node

__all__ = ["SUITES", "Catalogue", "collected", "files"]

SUITES = Path(__file__).resolve().parents[2] / "suites"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The ids of the cases that a session collected, those included that no world of the session suits.

    ``is_whole`` tells that these are all there are: every file of the suites was collected, and no case was
    left out by its name, its marks or its place.
    """

    cases: frozenset[str] = frozenset()
    is_whole: bool = False

    def narrowed(self) -> Catalogue:
        """The same cases, known to be a selection."""
        return Catalogue(cases=self.cases, is_whole=False)


def files() -> frozenset[str]:
    """List the files that hold cases, as their ids name them."""
    return frozenset(file.relative_to(SUITES).as_posix() for file in SUITES.rglob("test_*.py"))


def collected(nodeids: Iterable[str], arguments: Sequence[str]) -> Catalogue:
    """Tell from pytest's node ids, and from the arguments that it was called with, what was collected."""
    found = list(nodeids)
    cases = frozenset(node.case for nodeid in found if (node := Node.parse(nodeid)))
    seen = {nodeid.partition("::")[0].removeprefix("suites/") for nodeid in found}
    is_named = any("::" in argument for argument in arguments)
    return Catalogue(cases=cases, is_whole=not is_named and files() <= seen)
