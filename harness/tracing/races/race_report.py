"""A race as a plain value: two operators that access the same memory, and the missing wait. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from shardproof.harness.tracing.ledger import Phase

RACES = ".races.json"
"""How the file ends that holds a rank's report."""


class RaceKind(StrEnum):
    """The consequence if the second operator runs before, or while, the first does."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_READ = "write after read"
    WRITE_AFTER_WRITE = "write after write"
    REUSE = "reuse of released memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """One operator or collective that accessed memory: its stream, the unit's turn, and its call site.

    ``at_ns`` is the time by the clock of the event log; equality ignores it.
    """

    operator: str
    is_write: bool
    stream: str
    phase: Phase
    step: int
    microbatch: int
    unit: str | None
    site: str
    at_ns: int = field(default=0, compare=False)

    def __str__(self) -> str:
        verb = "writes" if self.is_write else "reads"
        where = [] if self.unit is None else [f"unit {self.unit!r}" if self.unit else "the root"]
        where += [str(self.phase)] + [f"step {self.step}"] * (self.step >= 0)
        where += [f"microbatch {self.microbatch}"] * (self.microbatch >= 0)
        return f"{self.operator} {verb} on {self.stream} ({', '.join([*where, f'at {self.site}'])})"

    @property
    def place(self) -> tuple[object, ...]:
        """Return the fields that touches of the same place share over steps, microbatches and tensors."""
        return (self.operator, self.is_write, self.stream, self.phase, self.unit, self.site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two unordered touches of the same memory; ``first`` was issued before ``second``.

    ``count`` is the number of races between these two places; the first one is reported.
    """

    kind: RaceKind
    first: Touch
    second: Touch
    count: int = 1

    @property
    def missing(self) -> str:
        """Return the wait that would order the two."""
        waiting, awaited = self.second.stream, self.first.stream
        if self.kind is RaceKind.REUSE:
            return (
                f"nothing has {waiting} wait for {awaited} between the two, and the memory was released meanwhile; "
                f"keep it until {waiting} has waited for an event recorded on {awaited} after {self.first.operator}, "
                "or call record_stream"
            )
        return (
            f"nothing has {waiting} wait for {awaited} between the two; "
            f"expected a wait for an event recorded on {awaited} after {self.first.operator}, or for its work"
        )

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count} times)"
        return f"{self.kind}{times}: {self.first}; then {self.second}; {self.missing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceReport:
    """The result of the watch over one rank's streams: how much it observed, and the races."""

    num_touches: int
    num_streams: int
    num_collectives: int
    races: tuple[Race, ...] = ()
