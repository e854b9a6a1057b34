"""What the laws over ledgers share: looking at every rank, moment by moment.

[Note: a blind law] A law that finds no entry where there should be some has proven nothing, so it fails. In
a world of several ranks that is so for a rank without any entry of its training, and for a selection that
covers no step or microbatch of the schedule, whatever the law says. A world of one rank need not communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.laws.communication.select import NOTHING_OBSERVED, Moment, Per, Select, shows_nothing
from harness.laws.law import Evidence
from harness.tracing.ledger import Entry, Ledger

__all__ = ["at", "blindness", "ledgers", "pick", "when"]


def blindness(evidence: Evidence, selects: Sequence[Select], per: Per) -> list[str]:
    """Tell why a law could not have failed, if so; see [Note: a blind law]."""
    schedule = evidence.training.schedule
    broken = [
        f"expected a {per.value} to look at, got none: {select} of {schedule.steps} step(s) with "
        f"{schedule.microbatches} microbatch(es); try a longer schedule"
        for select in selects
        if not select.moments(schedule, per)
    ]
    if evidence.world_size > 1:
        silent = [rank for rank, ledger in ledgers(evidence) if shows_nothing(ledger)]
        broken += [f"rank {rank}: {NOTHING_OBSERVED}" for rank in silent]
    return broken


def ledgers(evidence: Evidence) -> Iterator[tuple[int, Ledger]]:
    """Give each rank with its ledger."""
    for observation in evidence.ranks:
        yield observation.rank, observation.ledger


def pick(select: Select, ledger: Ledger, evidence: Evidence) -> Ledger:
    """Give what a selection picks, in order of issue."""
    return select.pick(ledger, evidence.training.schedule)


def at(moment: Moment, entries: Ledger) -> Ledger:
    """Keep what was issued at that moment."""
    return tuple(e for e in entries if moment.holds(e))


def when(entry: Entry) -> str:
    """Spell the moment of an entry."""
    return str(Moment(step=entry.step, microbatch=None if entry.microbatch < 0 else entry.microbatch))
