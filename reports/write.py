"""Writes the reports of a run beside its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.records.run import Run, read_run, write_file
from shardproof.reports import badge, ctrf, failure_summary, junit, markdown, page
from shardproof.reports.timeline_svg import pictures


class Written(NamedTuple):
    """The run with all problems of its files, and its written reports."""

    run: Run
    paths: tuple[Path, ...]


def write_reports(run_dir: Path) -> Written:
    """Read the run and write its reports, each whole or not at all."""
    run = read_run(run_dir)
    found = pictures(run, run_dir)
    run = replace(run, problems=(*run.problems, *found.problems))
    renderers: dict[str, Callable[[Run], str]] = {
        "report.html": partial(page.render, pictures=found.drawn),
        "report.md": markdown.render,
        "junit.xml": junit.render,
        "ctrf.json": ctrf.render,
        "summary.md": failure_summary.render,
        "badge.json": badge.endpoint,
        "badge.svg": badge.picture,
    }
    for name, render in renderers.items():  # one text at a time: they grow with the run
        write_file(run_dir / name, render(run))
    return Written(run, tuple(run_dir / name for name in renderers))
