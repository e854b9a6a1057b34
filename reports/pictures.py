"""Which records of a run get a timeline on the page, drawn from what was observed: few enough for a page to hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness.records.record import Record
from harness.records.run import Run
from harness.records.timeline import read_timeline
from harness.records.verdict import Verdict
from reports.matrix import by_severity
from reports.page import Key
from reports.timeline import draw

__all__ = ["Pictures", "pictures"]

_MOST_PICTURES = 24  # about 20 KiB each
_MOST_OF_FAILURES = 16  # so that some room is left for what passed


class Pictures(NamedTuple):
    """Pictures by their records, and which files were damaged where they were read."""

    drawn: dict[Key, str]
    problems: tuple[str, ...]


def pictures(run: Run, run_dir: Path) -> Pictures:
    """Draw what does not conform, the worst first, and one case that passed of each suite.

    What was not observed, or is too long for a picture, is left out; `shardproof timeline` exports that too.
    """
    drawn: dict[Key, str] = {}
    problems: dict[str, None] = {}
    for record in _worth_drawing(run):
        if len(drawn) == _MOST_PICTURES:
            break
        if not record.observation:
            continue
        timeline = read_timeline(run_dir / record.observation)
        problems |= dict.fromkeys(f"{record.observation}/{problem}" for problem in timeline.problems)
        if picture := draw(timeline):
            drawn[record.engine, record.case, record.world] = picture
    return Pictures(drawn, tuple(problems))


def _worth_drawing(run: Run) -> Iterator[Record]:
    failures = [r for r in by_severity(run.records) if r.verdict is not Verdict.PASSED]
    told = [r for r in failures if r.verdict not in {Verdict.UNSUPPORTED, Verdict.NOT_RUN}]
    yield from told[:_MOST_OF_FAILURES]
    suites: set[str] = set()
    for record in run.records:
        if record.verdict is Verdict.PASSED and record.suite not in suites:
            suites.add(record.suite)
            yield record
