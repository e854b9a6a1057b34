"""What a case is judged in: one engine in one world. No torch here, for who only reads options."""

from __future__ import annotations

from dataclasses import dataclass

from harness.worlds.spec import WorldSpec

__all__ = ["Cell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine, by the name it was given, in one world."""

    engine: str
    world: WorldSpec

    def __str__(self) -> str:
        return f"{self.engine}@{self.world}"
