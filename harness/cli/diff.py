"""The command ``shardproof diff``: read two runs, compare them, and print or write what changed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.errors import UsageError
from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.diff.comparison import Comparison, compare
from shardproof.harness.records.run import read_run, write_file
from shardproof.reports.diff_json import render_json
from shardproof.reports.diff_text import WIDTH, render, render_markdown, summary

__all__ = ["DiffRequest", "Format", "show_diff"]

_LEAST_WIDTH = 40  # in narrower terminals every line would wrap several times


class Format(StrEnum):
    """How a comparison is written."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRequest:
    """The runs to compare, and the output; no engines mean all, no ``out`` the standard output."""

    before: Path
    after: Path
    format: Format = Format.TERMINAL
    engines: Sequence[str] = ()
    out: Path | None = None


def show_diff(request: DiffRequest) -> int:
    """Print or write the comparison; returns 0 if nothing changed, 1 if something did or a run is damaged.

    Raises UsageError for a folder without a run, for a run compared with itself, and for an engine that neither run
    has.
    """
    _refuse_one_run(request)
    before, after = _read(request.before), _read(request.after)
    found = compare(before, after, engines=request.engines)
    text = _rendered(found, request)
    if request.out is None:
        print(text, end="")
    else:
        write_file(request.out, text)
        print(f"{summary(found)}\nwrote {request.out}")
    is_damaged = before.run.is_damaged or after.run.is_damaged
    return DOES_NOT_CONFORM if found.changes or is_damaged else CONFORMS


def _refuse_one_run(request: DiffRequest) -> None:
    if request.before.resolve() == request.after.resolve():
        raise UsageError(
            f"diff {request.before} {request.after}",
            expected="the folders of two runs",
            got="the same folder twice",
            hint="the folder of an earlier run first, and that of a later one second",
        )


def _read(folder: Path) -> ComparedRun:
    return ComparedRun(folder=str(folder), run=read_run(folder))


def _rendered(found: Comparison, request: DiffRequest) -> str:
    match request.format:
        case Format.TERMINAL:
            return render(found, width=WIDTH if request.out is not None else _width())
        case Format.MARKDOWN:
            return render_markdown(found)
        case Format.JSON:
            return render_json(found)
        case other:
            assert_never(other)


def _width() -> int:
    columns = shutil.get_terminal_size(fallback=(WIDTH, 24)).columns
    return max(_LEAST_WIDTH, min(WIDTH, columns))
