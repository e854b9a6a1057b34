"""What a case is judged in: one engine in one world. No torch here, for who only reads options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.registry import BUILT_IN
from harness.worlds.spec import WorldSpec

__all__ = ["Cell", "check_engines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine, by the name it was given, in one world."""

    engine: str
    world: WorldSpec

    def __str__(self) -> str:
        return f"{self.engine}@{self.world}"


def check_engines(names: Iterable[str]) -> None:
    """Raise EngineNotFoundError for a name that resolves to nothing, and what the import of an engine raises."""
    for name in names:
        if name not in BUILT_IN:
            from harness.aside import describe  # here, because it imports torch

            describe(name)
