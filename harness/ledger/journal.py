"""Reading what a rank wrote down as it happened: its ledger and its course, which lie in one file. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.ledger.course import Course, course_of
from harness.ledger.entry import (
    Entry,
    Harm,
    Ledger,
    Wait,
    completed,
    entry_from_json,
    harm_from_json,
    wait_from_json,
)

__all__ = ["Journal", "read_journal"]


class Journal(NamedTuple):
    """What one rank left; the course is empty where the file is older than courses."""

    ledger: Ledger
    course: Course


def read_journal(path: Path) -> Journal:
    """Read what a rank left behind, however it ended: an unfinished last line is dropped, a missing file is empty."""
    if not path.exists():
        return Journal((), ())
    whole = path.read_text().split("\n")[:-1]
    lines = json.loads(f"[{','.join(whole)}]")  # at once: there are thousands
    return Journal(_ledger_of(lines), course_of(lines))


# Any: JSON.
def _ledger_of(lines: Iterable[Mapping[str, Any]]) -> Ledger:
    entries: list[Entry] = []
    waits: dict[int, Wait] = {}
    harms: dict[int, tuple[Harm, ...]] = {}
    for line in lines:
        if "entry" in line:
            entries.append(entry_from_json(line["entry"]))
        elif "harm" in line:
            harm = harm_from_json({name: value for name, value in line.items() if name != "harm"})
            harms[line["harm"]] = (*harms.get(line["harm"], ()), harm)
        elif "over" in line:
            waits[line["over"]] = replace(waits[line["over"]], is_over=True)
        elif "wait" in line:
            waits[line["wait"]] = wait_from_json(line)
    return completed(entries, waits, harms)
