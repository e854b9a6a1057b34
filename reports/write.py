"""Writes the reports of a run beside its records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.records.run import Run, read_run, write_file
from shardproof.reports import badge, ctrf, failure_summary, junit, markdown, page
from shardproof.reports.timeline_svg import pictures


class Written(NamedTuple):
    """The run with all problems that its files have, and the reports written of it."""

    run: Run
    paths: tuple[Path, ...]


def write_reports(run_dir: Path) -> Written:
    """Read the run and write its reports, each whole or not at all."""
    run = read_run(run_dir)
    found = pictures(run, run_dir)
    run = replace(run, problems=(*run.problems, *found.problems))
    texts = {
        "report.html": page.render(run, found.drawn),
        "report.md": markdown.render(run),
        "junit.xml": junit.render(run),
        "ctrf.json": ctrf.render(run),
        "summary.md": failure_summary.render(run),
        "badge.json": badge.endpoint(run),
        "badge.svg": badge.picture(run),
    }
    for name, text in texts.items():
        write_file(run_dir / name, text)
    return Written(run, tuple(run_dir / name for name in texts))
