"""What a world is asked to be: its kind, size, device and deadline; how it is spelt on the command line."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import UsageError

__all__ = ["MAX_RANKS", "WorldKind", "WorldSpec"]

MAX_RANKS = 64


class WorldKind(StrEnum):
    """How ranks live."""

    THREADS = "threads"  # threads of one killable process, over our own in-memory collectives
    PROCESSES = "processes"  # a process each, over gloo on cpu and nccl on cuda


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpec:
    """One world. ``deadline_s`` bounds the whole case; ``collective_timeout_s`` is the process group's own.

    ``seed`` orders what the threads world may order freely: whose turn it is, and how late results are.
    """

    kind: WorldKind
    size: int
    device: str = "cpu"
    deadline_s: float = 60.0
    collective_timeout_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes and devices that no world has."""
        if not 1 <= self.size <= MAX_RANKS:
            raise UsageError(
                f"world {self}",
                expected=f"1 to {MAX_RANKS} ranks",
                got=str(self.size),
                hint="--world threads:4",
            )
        if self.kind is WorldKind.THREADS and self.device != "cpu":
            raise UsageError(
                f"world {self}",
                expected="threads on cpu",
                got=f"threads on {self.device}",
                hint=f"--world processes:{self.size}:{self.device}",
            )

    @classmethod
    def parse(cls, text: str, *, deadline_s: float = 60.0) -> WorldSpec:
        """Read ``threads:4``, ``processes:2`` or ``processes:2:cuda``; raises UsageError for the rest."""
        match = re.fullmatch(r"([a-z]+):(\d+)(?::(cpu|cuda))?", text)
        if match is None or match[1] not in set(WorldKind):
            near = difflib.get_close_matches(text.split(":")[0], list(WorldKind), n=1, cutoff=0.4)
            hint = f"{near[0]}:4" if near else "threads:4"
            raise UsageError(
                "--world",
                expected="KIND:SIZE or KIND:SIZE:DEVICE, with KIND threads or processes",
                got=repr(text),
                hint=f"--world {hint}",
            )
        return cls(
            kind=WorldKind(match[1]), size=int(match[2]), device=match[3] or "cpu", deadline_s=deadline_s
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}" + ("" if self.device == "cpu" else f":{self.device}")
