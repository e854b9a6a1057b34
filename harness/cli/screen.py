"""Writing and printing the reports of a run: with colours on a terminal, as plain text elsewhere."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM, NOTHING_JUDGED, OUR_FAULT
from shardproof.harness.records.record import Verdict

if TYPE_CHECKING:
    from rich.text import Text

    from shardproof.harness.records.run import Run

_NARROWEST, _WIDEST = 80, 160
# Of the overview: a name, then how many promises hold, and those with other verdicts by letter.
_COUNTS = re.compile(r"^\S+(?: +(?:-|\d+[A-Zk]?))+$", re.MULTILINE)
_CELLS = re.compile(r"^ {2}\S.*?(?P<cells>(?: +[-.A-Zk]{1,3})+)$", re.MULTILINE)


def show_run(folder: Path, arguments: argparse.Namespace, render: Callable[[Run], str] | None = None) -> int:
    """Write a run's reports, print it in the selected format, and return the exit code."""
    from shardproof.harness.records.proof import unjudged
    from shardproof.reports.summary import Conclusion, conclude, conforms
    from shardproof.reports.write import write_reports

    run, paths = write_reports(folder)
    _print(run, folder, paths, arguments, render)
    if Verdict.ERRORED in {record.verdict for record in run.records}:
        return OUR_FAULT
    if conclude(run) is Conclusion.EMPTY:
        print(*(f"shardproof: {sentence}" for sentence in unjudged(run.records)), sep="\n", file=sys.stderr)
        return NOTHING_JUDGED
    return CONFORMS if conforms(run) else DOES_NOT_CONFORM


def _print(
    run: Run,
    folder: Path,
    paths: Sequence[Path],
    arguments: argparse.Namespace,
    render: Callable[[Run], str] | None,
) -> None:
    from shardproof.reports import summary_json, terminal

    if arguments.json:
        print(summary_json.render(run, folder, paths))
    elif arguments.quiet:
        show(terminal.render_causes(run, width=width()))
    else:
        is_verbose = arguments.verbose
        own = None if is_verbose else render
        show(own(run) if own else terminal.render(run, width=width(), is_verbose=is_verbose))
        print(*(f"wrote {path}" for path in paths), sep="\n")


def width() -> int:
    """Return how many columns a report may take: the terminal's, within reason; 80 in a pipe."""
    return min(max(shutil.get_terminal_size((_NARROWEST, 24)).columns, _NARROWEST), _WIDEST)


def show(text: str) -> None:
    """Print a report; in colours if rich detects a terminal or FORCE_COLOR is set, and NO_COLOR is not."""
    if not sys.stdout.isatty() and "FORCE_COLOR" not in os.environ:
        print(text)
        return
    from rich.console import Console

    Console(highlight=False).print(styled(text), soft_wrap=True)


def styled(text: str) -> Text:
    """Colour the verdicts of a text, by name and as letters in the cells of a matrix."""
    from rich.text import Text

    made = Text(text)
    for pattern, style in _styles():
        made.highlight_regex(pattern, style)
    for row in _COUNTS.finditer(text):
        for other in re.finditer(r"\d+([A-Zk])", row[0]):
            made.stylize(_letters().get(other[1], ""), row.start() + other.start(), row.start() + other.end())
    for row in _CELLS.finditer(text):
        for letter in re.finditer(r"\S", row["cells"]):
            start = row.start("cells") + letter.start()
            made.stylize(_letters().get(letter[0], ""), start, start + 1)
    return made


def _styles() -> Iterator[tuple[str, str]]:
    from shardproof.reports.verdict_style import MARKS

    for verdict, mark in MARKS.items():
        yield rf"\b{verdict}\b", _TONES[mark.tone.value]
    yield r"(?m)^Conforming\b", "bold green"
    yield r"(?m)^(Not conforming|Not proven|NOT PROVEN|Incomplete|Nothing judged)\b", "bold red"
    yield r"(?m)^(WARNING|STALE)\b", "yellow"
    yield r"(?m)^ +repeat .*$", "dim"


def _letters() -> dict[str, str]:
    from shardproof.reports.verdict_style import MARKS

    return {mark.letter: _TONES[mark.tone.value] for mark in MARKS.values()}


_TONES = {"good": "green", "bad": "bold red", "doubtful": "yellow", "known": "cyan", "muted": "dim"}
