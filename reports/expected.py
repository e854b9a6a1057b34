"""What a run expected to fail: known failures, told once for each entry, and entries that bore on nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.records.record import Expectation, Record, Verdict
from harness.records.run import Run
from reports.text import one_line

__all__ = ["Known", "address", "idle", "known", "stale", "told"]

_ADDRESS = re.compile(r"https?://[^\s<>\"'`|\\\x00-\x20\x7f-\U0010ffff]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """An entry of the expectations file, and how many records it explains."""

    expectation: Expectation
    count: int


def known(run: Run) -> tuple[Known, ...]:
    """Give the entries that excuse some record, in the order of the file."""
    counts: dict[Expectation, int] = {}
    for record in run.records:
        if record.verdict is Verdict.KNOWN_FAILURE and record.expectation is not None:
            counts[record.expectation] = counts.get(record.expectation, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: item[0].number)
    return tuple(Known(expectation=entry, count=count) for entry, count in ordered)


def stale(run: Run) -> tuple[str, ...]:
    """Tell the entries that fail the run, because they excuse what is not there."""
    return _unused(run, is_stale=True)


def idle(run: Run) -> tuple[str, ...]:
    """Tell the other entries that bore on nothing here; they say nothing against the run."""
    return _unused(run, is_stale=False)


def told(record: Record) -> str:
    """Tell the expectation of a record in one line; empty if none bore on it."""
    entry = record.expectation
    if entry is None:
        return ""
    until = f"until {entry.expiry}"
    return one_line(f"expectation {entry.number}: {entry.reason} ({entry.link}), {until}", limit=1000)


def address(link: str) -> str:
    """Give a link back if it is safe to be followed, else nothing: records may come from anywhere."""
    return link if _ADDRESS.fullmatch(link) else ""


def _unused(run: Run, *, is_stale: bool) -> tuple[str, ...]:
    found = run.footer.unused if run.footer is not None else ()
    return tuple(
        f"expectation {u.expectation.number} ({u.expectation.engine}, {u.expectation.case}): {u.why}"
        for u in found
        if u.is_stale is is_stale
    )
