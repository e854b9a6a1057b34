"""A run as text for a terminal: the matrix, the legend, the counts, and what does not conform."""

from __future__ import annotations

import re
import textwrap

from tabulate import tabulate

from shardproof.harness.records.record import MOST_LISTED, Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports import evidence
from shardproof.reports.causes import Cause, causes
from shardproof.reports.expected import expectation_text, idle, known, stale
from shardproof.reports.matrix import Column, Matrix, arrange, label
from shardproof.reports.summary import Tally, conclude, tally, warnings
from shardproof.reports.text import duration, one_line, versions
from shardproof.reports.verdict_style import MARKS

_WIDTH = 100
_MOST_OF_A_HANG = 8  # lines
_NUM_HEADLINES = 50  # beyond these a terminal scrolls them away anyway
_NUM_ALIKE = 5  # cases named of those that fail like another


def render(run: Run) -> str:
    """Render the run; plain ASCII but for what engines and cases themselves say."""
    counted = tally(run.records)
    parts = [
        _origin(run),
        _table(arrange(run)),
        _legend(counted),
        *_headlines(run),
        *_known(run),
        *_unused(run),
        *_warnings(run),
        _score(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(run: Run) -> str:
    found = run.header
    return one_line(f"{found.command}\n({versions(found.versions)})", limit=1000)


def _table(matrix: Matrix) -> str:
    if not matrix.columns:
        return ""
    headers = ["case", *(_heading(column) for column in matrix.columns)]
    lines: list[list[str]] = []
    for suite in matrix.suites:
        lines.append([one_line(suite.suite or "(no suite)").upper(), *("" for _ in matrix.columns)])
        for row in suite.rows:
            cells = ("".join(MARKS[record.verdict].letter for record in cell) for cell in row.cells)
            lines.append([f"  {one_line(row.label, limit=_WIDTH)}", *cells])
    return _aligned(headers, lines)


def _heading(column: Column) -> str:
    # Broken where names have joints, so that a column is not much wider than its one letter.
    engine = re.sub(r"(?<=[./:])(?=.)", "\n", one_line(column.engine))
    return f"{engine}\n{one_line(column.world)}"


def _aligned(headers: list[str], lines: list[list[str]]) -> str:
    alignment = ("left", *("center" for _ in headers[1:]))
    # A mark is text even where it looks like a number, and the indent of a case is meant.
    return tabulate(
        lines,
        headers=headers,
        tablefmt="simple",
        colalign=alignment,
        disable_numparse=True,
        preserve_whitespace=True,
    )


def _legend(counted: Tally) -> str:
    rows = [
        (MARKS[verdict].letter, str(verdict), str(count), MARKS[verdict].phrase)
        for verdict, count in counted.counts.items()
    ]
    alignment = ("left", "left", "right", "left")
    return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=alignment) if rows else ""


def _headlines(run: Run) -> list[str]:
    """Return each cause once: the headline of its first record, and the cases that fail alike."""
    found = causes(run.records)
    parts = []
    for cause in found[:_NUM_HEADLINES]:
        record = cause.example
        cell = f"{record.verdict} {record.engine} in {record.world}: {label(record.case, record.suite)}"
        lines = (
            one_line(cell),
            _wrapped(record.headline),
            *_hang(record),
            f"    {expectation_text(record)}",
            *_alike(cause),
        )
        parts.append("\n".join(line for line in lines if line.strip()))
    if len(found) > _NUM_HEADLINES:
        parts.append(f"... and {len(found) - _NUM_HEADLINES} more causes; the reports have them all")
    return parts


def _alike(cause: Cause) -> list[str]:
    """Return which other records fail alike."""
    others = cause.records[1:]
    if not others:
        return []
    names = [f"{label(r.case, r.suite)} in {r.world}" for r in others[:_NUM_ALIKE]]
    more = [f"{len(others) - _NUM_ALIKE} more"] if len(others) > _NUM_ALIKE else []
    return [_wrapped(f"alike: {', '.join([*names, *more])}")]


def _wrapped(text: str) -> str:
    line = one_line(text, limit=500)
    return textwrap.fill(line, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _hang(record: Record) -> list[str]:
    """Return of ranks in one card in a line or two each, and of the call at which they parted."""
    if record.hang is None:
        return []
    hang_lines = evidence.hang_lines(record.hang)
    kept = hang_lines if len(hang_lines) <= _MOST_OF_A_HANG else [*hang_lines[:_MOST_OF_A_HANG], "..."]
    return [
        textwrap.fill(
            one_line(line, limit=400), _WIDTH, initial_indent="      ", subsequent_indent="        "
        )
        for line in kept
    ]


def _known(run: Run) -> list[str]:
    return [
        f"{Verdict.KNOWN_FAILURE} {one_line(k.expectation.engine)}: {k.count} of {len(run.records)} records\n"
        f"    {one_line(k.expectation.reason)}\n"
        f"    {one_line(k.expectation.link)}, until {one_line(k.expectation.expiry)}"
        for k in known(run)
    ]


def _unused(run: Run) -> list[str]:
    lines = [f"STALE {one_line(text)}" for text in stale(run)]
    found = idle(run)
    if len(found) > MOST_LISTED:
        lines.append(
            f"not exercised: {len(found)} expectations, of other cases or worlds; report.md lists them"
        )
    else:
        lines += [f"not exercised: {one_line(text)}" for text in found]
    return ["\n".join(lines)] if lines else []


def _warnings(run: Run) -> list[str]:
    return [f"WARNING: {one_line(text)}" for text in warnings(run)]


def _score(run: Run) -> str:
    counted = tally(run.records)
    took = f" in {duration(run.footer.duration_s)}" if run.footer else ""
    num_stale = len(stale(run))
    expecting = f", {num_stale} stale expectation{'s' * (num_stale > 1)}" if num_stale else ""
    return f"{conclude(run).value}: {counted.score}{took}, {counted.num_not_conforming} not conforming{expecting}"
