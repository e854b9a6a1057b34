"""The command ``shardproof timeline``: find a case of a run, and write its timeline for a trace viewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.errors import UsageError
from shardproof.harness.records.rank_timeline import read_timeline
from shardproof.harness.records.record import Record
from shardproof.harness.records.run import read_run, write_file
from shardproof.reports.matrix import by_severity
from shardproof.reports.perfetto import render

__all__ = ["TimelineRequest", "export"]

_FILE = "timeline.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRequest:
    """What to write and where: ``case`` is a name or a part of one, empty for any; no engines or ranks mean all."""

    run: Path
    case: str = ""
    engines: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    out: Path | None = None


def export(request: TimelineRequest) -> int:
    """Write the trace of the worst record that matches; returns 1 if a file of the run is damaged, else 0.

    Raises UsageError if no record matches, or if there are no observations.
    """
    run = read_run(request.run)
    record = _choose(by_severity(run.records), request)
    timeline = read_timeline(request.run / record.observation)
    kept = timeline.of_ranks(lambda rank: not request.ranks or rank in request.ranks)
    if not kept.ranks:
        raise UsageError(
            f"timeline of {record.engine} on {record.case}",
            expected=f"journals of rank(s) {list(request.ranks) or 'of the world'} with events",
            got=f"those of rank(s) {[rank.rank for rank in timeline.ranks]}",
            hint="another --rank, or running the case again with this release",
        )
    out = request.out or request.run / _FILE
    write_file(out, render(kept, title=f"{record.engine} in {record.world}: {record.case}"))
    num_races = sum(len(rank.races) for rank in kept.ranks)
    print(f"{record.verdict} {record.engine} in {record.world}: {record.case}")
    print(f"{len(kept.ranks)} rank(s), {len(kept.steps)} step(s), {num_races} race(s)")
    print(f"wrote {out}; open it in https://ui.perfetto.dev or chrome://tracing")
    problems = (*run.problems, *kept.problems) if run.is_damaged else kept.problems
    for problem in problems:
        print(f"warning: {problem}")
    return DOES_NOT_CONFORM if problems else CONFORMS


def _choose(records: Sequence[Record], request: TimelineRequest) -> Record:
    """Return the worst record that matches and has observations; an exact name takes precedence over a part."""
    asked = [r for r in records if not request.engines or r.engine in request.engines]
    observed = [r for r in asked if r.observation and request.case in r.case]
    if found := [r for r in observed if request.case == r.case] or observed:
        return found[0]
    near = get_close_matches(request.case, [r.case for r in asked], n=1, cutoff=0.3)
    raise UsageError(
        f"--case {request.case!r}",
        expected=f"some record of {', '.join(request.engines) or 'the run'} that was observed",
        got="none",
        hint=f"--case '{near[0]}'" if near else "leaving it out, or another --engine",
    )
