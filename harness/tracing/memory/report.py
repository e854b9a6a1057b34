"""What the watch over one rank's memory saw, as plain values; how it travels as JSON. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from typing import Any

from harness.tracing.ledger import Phase

__all__ = [
    "Allocation",
    "Kind",
    "LifetimeReport",
    "Stretch",
    "UserTensor",
    "report_from_json",
    "report_to_json",
]


class Kind(StrEnum):
    """What memory is for, told from all that happened to it."""

    SHARDED = (
        "sharded"  # the optimizer's parameters: this rank's share, or the whole where nothing is sharded
    )
    GATHERED = "gathered"  # whole parameters, or a larger part of them than the share
    STAGING = "staging"  # what collectives are packed into or unpacked from, and nothing else
    GRADIENT = "gradient"  # gradients that are still to be reduced
    REDUCED = "reduced"  # gradients that are reduced
    OPTIMIZER = "optimizer"  # what the optimizer step makes
    USER = (
        "user"  # the training loop's own tensors, buffers, and parameters that the engine is to leave alone
    )
    OTHER = "other"  # activations, and what comes and goes with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One piece of memory from event ``born`` on, until it was given back at event ``died``; None: never.

    ``unit`` is the unit of the plan whose parameters or gradients are in it, ``""`` the root; None where that is
    unknown, or several. Where a storage is resized one life ends and another begins.
    """

    kind: Kind
    unit: str | None
    num_bytes: int
    born: int
    died: int | None
    operator: str
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Where the training loop stood from event ``start`` until the next stretch."""

    start: int
    phase: Phase
    step: int
    microbatch: int
    unit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTensor:
    """A tensor of the user's, of which the watch saw that it changed its memory; ``change`` is empty if not."""

    name: str
    num_bytes: int
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeReport:
    """One rank's memory over a training: lives in the order of their births, and stretches in that of time."""

    num_events: int
    num_collectives: int
    lives: tuple[Allocation, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    user_tensors: tuple[UserTensor, ...] = ()


def report_to_json(report: LifetimeReport) -> dict[str, Any]:
    """Give the report in JSON's own types; there are thousands of lives, so they go without the names of fields."""
    return {
        "num_events": report.num_events,
        "num_collectives": report.num_collectives,
        "lives": [list(astuple(life)) for life in report.lives],
        "stretches": [list(astuple(stretch)) for stretch in report.stretches],
        "user_tensors": [asdict(tensor) for tensor in report.user_tensors],
    }


# Any: JSON.
def report_from_json(plain: Mapping[str, Any]) -> LifetimeReport:
    """Read what `report_to_json` gave."""
    return LifetimeReport(
        num_events=plain["num_events"],
        num_collectives=plain["num_collectives"],
        lives=tuple(_lives(plain["lives"])),
        stretches=tuple(_stretches(plain["stretches"])),
        user_tensors=tuple(UserTensor(**tensor) for tensor in plain["user_tensors"]),
    )


def _lives(plain: list[Any]) -> Iterator[Allocation]:
    for kind, unit, num_bytes, born, died, operator, site in plain:
        yield Allocation(
            kind=Kind(kind),
            unit=unit,
            num_bytes=num_bytes,
            born=born,
            died=died,
            operator=operator,
            site=site,
        )


def _stretches(plain: list[Any]) -> Iterator[Stretch]:
    for start, phase, step, microbatch, unit in plain:
        yield Stretch(start=start, phase=Phase(phase), step=step, microbatch=microbatch, unit=unit)
