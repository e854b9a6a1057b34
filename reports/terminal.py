"""A run as text for a terminal: one small table, the counts, and the failures by cause; on demand every case."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from shardproof.harness.records.record import MOST_LISTED, Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports import evidence
from shardproof.reports.causes import Cause, causes
from shardproof.reports.expected import expectation_text, idle, known, stale
from shardproof.reports.matrix import Column, Matrix, SuiteRows, arrange, label
from shardproof.reports.overview import overview_lines
from shardproof.reports.summary import Tally, conclude, declared_zeros, limited, tally, warnings
from shardproof.reports.text import duration, one_line, versions
from shardproof.reports.verdict_style import MARKS

_WIDTH = 100
_PADDING = 4  # tabulate's padding of a heading, and its gap between two columns
_MOST_OF_A_HANG = 8  # lines
_NUM_HEADLINES = 50  # more would scroll out of a terminal
_NUM_DETAILED = 3  # causes shown with the details of their laws, and the ranks' output
_NUM_DETAILS = 2  # of one law
_NUM_PRINTED = 10  # last lines of the ranks' output
_NUM_ALIKE = 5  # named cases that fail like another


def render(run: Run, *, width: int = _WIDTH, is_verbose: bool = False) -> str:
    """Render the run in lines of ``width`` characters; plain ASCII except for texts of engines and cases.

    If ``is_verbose``, with the verdict of each case, and what is of no consequence.
    """
    parts = [
        *([_origin(run), *_tables(arrange(run), width)] if is_verbose else []),
        "\n".join(overview_lines(run, width)),
        _legend(tally(run.records)),
        *_headlines(run, width),
        *_known(run),
        *([*map(one_line, declared_zeros(run)), *_unexercised(run)] if is_verbose else []),
        *(f"STALE {one_line(text)}" for text in stale(run)),
        *_warnings(run),
        *_limited(run),
        _score(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_causes(run: Run, *, width: int = _WIDTH) -> str:
    """Render the failures, and the score."""
    return "\n\n".join([*_headlines(run, width), *_warnings(run), *_limited(run), _score(run)]) + "\n"


def _origin(run: Run) -> str:
    found = run.header
    return one_line(f"{found.command}\n({versions(found.versions)})", limit=1000)


def _tables(matrix: Matrix, width: int) -> Iterator[str]:
    """Yield the matrix in as many tables as its columns need to fit; conforming rows with equal cells are folded."""
    headings = [_heading(column) for column in matrix.columns]
    rows = [row for suite in matrix.suites for row in _rows(suite, limit=width // 2)]
    wide = max((len(row[0]) for row in rows), default=0) + _PADDING
    for fitting in _fitting(headings, width - wide):
        lines = [[row[0], *(row[1 + number] for number in fitting)] for row in rows]
        shown = [line for line in lines if any(line[1:]) or not line[0].startswith(" ")]
        yield _aligned(["case", *(headings[number] for number in fitting)], shown)


def _fitting(headings: Sequence[str], room: int) -> Iterator[list[int]]:
    """Yield the numbers of columns that share a table."""
    fitting: list[int] = []
    left = room
    for number, heading in enumerate(headings):
        needed = _PADDING + max(map(len, heading.splitlines()), default=0)
        if fitting and needed > left:
            yield fitting
            fitting, left = [], room
        fitting.append(number)
        left -= needed
    if fitting:
        yield fitting


def _rows(suite: SuiteRows, *, limit: int) -> Iterator[list[str]]:
    """Yield the name of a suite, its rows with a cell that does not conform, and the others by their verdicts."""
    num_columns = max(len(row.cells) for row in suite.rows)
    yield [one_line(suite.suite or "(no suite)").upper(), *("" for _ in range(num_columns))]
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in suite.rows:
        letters = tuple("".join(MARKS[record.verdict].letter for record in cell) for cell in row.cells)
        name = f"  {one_line(row.label, limit=limit)}"
        if all(record.verdict.is_conforming for cell in row.cells for record in cell):
            alike.setdefault(letters, []).append(name)
        else:
            yield [name, *letters]
    for letters, names in alike.items():
        yield [names[0] if len(names) == 1 else f"  {len(names)} cases", *letters]


def _heading(column: Column) -> str:
    # Broken between the parts of names, so that a column is not much wider than its one letter.
    engine = re.sub(r"(?<=[./:])(?=.)", "\n", one_line(column.engine))
    return f"{engine}\n{one_line(column.world)}"


def _aligned(headers: list[str], lines: list[list[str]]) -> str:
    alignment = ("left", *("center" for _ in headers[1:]))
    # A mark is text even if it looks like a number, and the indent of a case is intended.
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


def _headlines(run: Run, width: int) -> list[str]:
    """Return each cause once: the headline of its first record, and the cases that fail alike."""
    found = causes(run.records)
    parts = []
    for number, cause in enumerate(found[:_NUM_HEADLINES]):
        record = cause.example
        cell = f"{record.verdict} {record.engine} in {record.world}: {label(record.case, record.suite)}"
        lines = (
            one_line(cell),
            _wrapped(record.headline, width),
            _wrapped(f"first wrong: {record.located.sentence}", width) if record.located else "",
            *_hang(record, width),
            f"    {expectation_text(record)}",
            *(_details(record, width) if number < _NUM_DETAILED else ()),
            *_alike(cause, width),
            f"    repeat: {one_line(record.command)}" if record.command else "",  # not wrapped: it is copied
        )
        parts.append("\n".join(line for line in lines if line.strip()))
    if len(found) > _NUM_HEADLINES:
        parts.append(f"... and {len(found) - _NUM_HEADLINES} more causes; the reports have them all")
    return parts


def _details(record: Record, width: int) -> Iterator[str]:
    """Yield the findings of the broken laws, and the end of the ranks' output."""
    for law in record.laws:
        if not law.held:
            if law.summary not in record.headline:
                yield _wrapped(f"{law.law}: {law.summary}", width)
            yield from (_wrapped(detail, width, indent=6) for detail in law.details[:_NUM_DETAILS])
            if len(law.details) > _NUM_DETAILS:
                yield f"      and {len(law.details) - _NUM_DETAILS} more"
    if record.output:
        yield "    printed:"
        yield from (_wrapped(line, width, indent=6) for line in record.output.splitlines()[-_NUM_PRINTED:])


def _alike(cause: Cause, width: int) -> list[str]:
    """Return which other records fail alike."""
    others = cause.records[1:]
    if not others:
        return []
    names = [f"{label(r.case, r.suite)} in {r.world}" for r in others[:_NUM_ALIKE]]
    more = [f"{len(others) - _NUM_ALIKE} more"] if len(others) > _NUM_ALIKE else []
    return [_wrapped(f"alike: {', '.join([*names, *more])}", width)]


def _wrapped(text: str, width: int, *, indent: int = 4) -> str:
    line = one_line(text, limit=500)
    return textwrap.fill(
        line, min(width, _WIDTH), initial_indent=" " * indent, subsequent_indent=" " * indent
    )


def _hang(record: Record, width: int) -> list[str]:
    """Return a line or two for each card of ranks, and the call on which they diverged."""
    if record.hang is None:
        return []
    hang_lines = evidence.hang_lines(record.hang)
    kept = hang_lines if len(hang_lines) <= _MOST_OF_A_HANG else [*hang_lines[:_MOST_OF_A_HANG], "..."]
    return [_wrapped(line, width, indent=6) for line in kept]


def _known(run: Run) -> list[str]:
    return [
        f"{Verdict.KNOWN_FAILURE} {one_line(k.expectation.engine)}: {k.count} of {len(run.records)} records\n"
        f"    {one_line(k.expectation.reason)}\n"
        f"    {one_line(k.expectation.link)}, until {one_line(k.expectation.expiry)}"
        for k in known(run)
    ]


def _unexercised(run: Run) -> list[str]:
    found = idle(run)
    if len(found) > MOST_LISTED:
        return [f"not exercised: {len(found)} expectations, of other cases or worlds; report.md lists them"]
    return ["\n".join(f"not exercised: {one_line(text)}" for text in found)]


def _limited(run: Run) -> list[str]:
    found = [one_line(text) for text in limited(run)]
    return ["\n".join(["the time was limited:", *(f"    {text}" for text in found)])] if found else []


def _warnings(run: Run) -> list[str]:
    return [f"WARNING: {one_line(text)}" for text in warnings(run)]


def _score(run: Run) -> str:
    counted = tally(run.records)
    took = f" in {duration(run.footer.duration_s)}" if run.footer else ""
    num_stale = len(stale(run))
    expecting = f", {num_stale} stale expectation{'s' * (num_stale > 1)}" if num_stale else ""
    return f"{conclude(run).value}: {counted.score}{took}, {counted.num_not_conforming} not conforming{expecting}"
