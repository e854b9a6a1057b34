"""A cell: the engine and the world in which a case is judged. No torch here."""

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
        """Whether the cell runs no engine."""
        return self.engine == PLACEHOLDER

    def __str__(self) -> str:
        return f"{self.engine}@{self.world}"
