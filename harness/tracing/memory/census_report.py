"""The count of a census on one rank, as plain values. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    device: str = "cpu"

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return (
            f"{self.num_bytes} bytes{where} of shape {list(self.shape)} from {self.operator} at {self.site}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusEntry:
    """All memory that a rank holds at one moment of a step, and the largest pieces of it.

    ``process_bytes`` is the growth of its process since before the model was built, observations excluded. It is None
    where it was not requested, or where ranks share a process. ``device_bytes`` are those on an accelerator.
    """

    step: int
    moment: CensusTime
    num_bytes: int
    largest: tuple[LiveStorage, ...]
    process_bytes: int | None = None
    device_bytes: int = 0
