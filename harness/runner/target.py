"""What a case is judged in: one engine in one world. No torch here, for who only reads options."""

from __future__ import annotations

from dataclasses import dataclass

from harness.worlds.spec import WorldSpec

__all__ = ["PLACEHOLDER", "Cell"]

PLACEHOLDER = "nobody"  # no engine: the instance of a case that tells its marks and never runs


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
