"""Known failures of a run: each cause once, and the entries of the expectations file that no record used."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardproof.harness.records.record import Expectation, Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports.text import one_line

_ADDRESS = re.compile(r"https?://[^\s<>\"'`|\\\x00-\x20\x7f-\U0010ffff]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A cause in the expectations file, by one of its cases, and how many records it explains."""

    expectation: Expectation
    count: int


def known(run: Run) -> tuple[Known, ...]:
    """Return the causes that excuse some record, once for each engine, in the order of the file."""
    excused: dict[tuple[int, str, str], list[Expectation]] = {}
    for record in run.records:
        entry = record.expectation
        if record.verdict is Verdict.KNOWN_FAILURE and entry is not None:
            excused.setdefault((entry.number, entry.engine, entry.reason), []).append(entry)
    return tuple(Known(expectation=entries[0], count=len(entries)) for _, entries in sorted(excused.items()))


def stale(run: Run) -> tuple[str, ...]:
    """Return the stale entries, which fail the run."""
    return _unused(run, is_stale=True)


def idle(run: Run) -> tuple[str, ...]:
    """Return the other entries that applied to no record; they do not fail the run."""
    return _unused(run, is_stale=False)


def expectation_text(record: Record) -> str:
    """Return the expectation of a record in one line; empty if it has none."""
    return "" if record.expectation is None else one_line(str(record.expectation), limit=1000)


def address(link: str) -> str:
    """Return a link if it is safe to follow, else nothing: records may come from untrusted sources."""
    return link if _ADDRESS.fullmatch(link) else ""


def _unused(run: Run, *, is_stale: bool) -> tuple[str, ...]:
    found = run.footer.unused if run.footer is not None else ()
    return tuple(str(unused) for unused in found if unused.is_stale is is_stale)
