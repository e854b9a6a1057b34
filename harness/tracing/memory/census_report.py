"""What a census counted on one rank, as plain values; how it travels as JSON. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CensusTime(StrEnum):
    """When the memory was counted."""

    REDUCED = "after the last backward"
    STEPPED = "after the optimizer step"
    CLEARED = "after zero_grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorage:
    """One storage: its bytes now, and the shape, operator and call site of the first tensor seen in it."""

    num_bytes: int
    shape: tuple[int, ...]
    operator: str
    site: str

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes of shape {list(self.shape)} from {self.operator} at {self.site}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusEntry:
    """All memory that a rank holds at one moment of a step, and the largest pieces of it.

    ``process_bytes``: by how much its process has grown since before the model was built, observations left out;
    None where that was not asked for, or ranks share a process.
    """

    step: int
    moment: CensusTime
    num_bytes: int
    largest: tuple[LiveStorage, ...]
    process_bytes: int | None = None


# Any: JSON.
def counts_to_json(counts: Iterable[CensusEntry]) -> list[dict[str, Any]]:
    """Write counts in JSON's own types."""
    return [asdict(count) for count in counts]


def counts_from_json(plain: Iterable[dict[str, Any]]) -> tuple[CensusEntry, ...]:
    """Read what `counts_to_json` wrote."""
    return tuple(
        CensusEntry(
            step=count["step"],
            moment=CensusTime(count["moment"]),
            num_bytes=count["num_bytes"],
            process_bytes=count.get("process_bytes"),  # kept before there was one
            largest=tuple(
                LiveStorage(
                    num_bytes=piece["num_bytes"],
                    shape=tuple(piece["shape"]),
                    operator=piece["operator"],
                    site=piece["site"],
                )
                for piece in count["largest"]
            ),
        )
        for count in plain
    )
