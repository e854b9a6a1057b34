"""Which records of a run get a timeline on the page, drawn from what was observed: few enough for a page to hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.record import Record
from harness.run_directory import Run
from harness.timeline import read_timeline
from harness.verdict import Verdict
from reports.matrix import by_severity
from reports.page import Key
from reports.timeline import draw

__all__ = ["pictures"]

_MOST_PICTURES = 24  # about 20 KiB each
_MOST_OF_FAILURES = 16  # so that some room is left for what passed


def pictures(run: Run, run_dir: Path) -> dict[Key, str]:
    """Draw what does not conform, the worst first, and one case that passed of each suite.

    What was not observed, or is too long for a picture, is left out; `shardproof timeline` exports that too.
    """
    drawn: dict[Key, str] = {}
    for record in _worth_drawing(run):
        if len(drawn) == _MOST_PICTURES:
            break
        if record.observation and (picture := draw(read_timeline(run_dir / record.observation))):
            drawn[record.engine, record.case, record.world] = picture
    return drawn


def _worth_drawing(run: Run) -> Iterator[Record]:
    failures = [r for r in by_severity(run.records) if r.verdict is not Verdict.PASSED]
    told = [r for r in failures if r.verdict not in {Verdict.UNSUPPORTED, Verdict.NOT_RUN}]
    yield from told[:_MOST_OF_FAILURES]
    suites: set[str] = set()
    for record in run.records:
        if record.verdict is Verdict.PASSED and record.suite not in suites:
            suites.add(record.suite)
            yield record
