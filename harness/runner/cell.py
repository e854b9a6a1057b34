"""Where a case is judged: an engine in a world. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.harness.worlds.spec import WorldSpec

PLACEHOLDER = "placeholder"  # no engine: the instance of a case whose marks are read and that never runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine, by the name it was given, in one world."""

    engine: str
    world: WorldSpec

    @property
    def is_placeholder(self) -> bool:
        """Whether nothing is to be run."""
        return self.engine == PLACEHOLDER

    def __str__(self) -> str:
        return f"{self.engine}@{self.world}"
