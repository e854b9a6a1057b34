"""What a pytest node id says of a case: its engine, world and suite, and the id that names neither."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

__all__ = ["Node"]

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
        stem = nodeid[: match.start()].removeprefix("suites/")
        rest = f"[{match['rest']}]" if match["rest"] else ""
        suite = stem.split("/")[0] if "/" in stem else ""
        return cls(nodeid=nodeid, engine=match["engine"], world=match["world"], case=stem + rest, suite=suite)

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the record of this case."""
        return (self.engine, self.case, self.world)

    @property
    def command(self) -> str:
        """The command that repeats this one case."""
        return shlex.join(["pytest", self.nodeid, "--engine", self.engine, "--world", self.world])
