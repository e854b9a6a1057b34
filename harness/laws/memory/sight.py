"""What the laws over memory share: every rank's report, and how memory is told.

[Note: a blind watch] A rank without a report, or whose report shows no step or nothing of what a law is about,
breaks the law: nothing was shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.laws.law import Evidence
from harness.tracing.memory.report import Allocation, LifetimeReport

__all__ = ["MOST_SITES", "made", "reports"]

MOST_SITES = 4
"""So many lives are told by where they were made: enough to see who makes them."""


def reports(evidence: Evidence, broken: list[str]) -> Iterator[tuple[int, LifetimeReport]]:
    """Give each rank's report; see [Note: a blind watch]."""
    for observation in evidence.ranks:
        report = observation.lifetime_report
        if report is None or not report.lives or not report.stretches:
            broken.append(
                f"rank {observation.rank}: expected a watch over its memory, got none that saw any; "
                "try watch=frozenset({Watch.LIFETIMES})"
            )
        else:
            yield observation.rank, report


def made(life: Allocation) -> str:
    """Tell what made a piece of memory."""
    unit = "" if life.unit is None else f" of unit {life.unit!r}"
    return f"{life.num_bytes} bytes{unit} from {life.operator} at {life.site}"
