"""Writes the reports of a run beside its records."""

from __future__ import annotations

from pathlib import Path

from harness.run_directory import read_run, write_file
from reports import junit, markdown, page
from reports.pictures import pictures

__all__ = ["write_reports"]


def write_reports(run_dir: Path) -> tuple[Path, ...]:
    """Read the run and write report.html, report.md and junit.xml, each whole or not at all."""
    run = read_run(run_dir)
    texts = {
        "report.html": page.render(run, pictures(run, run_dir)),
        "report.md": markdown.render(run),
        "junit.xml": junit.render(run),
    }
    for name, text in texts.items():
        write_file(run_dir / name, text)
    return tuple(run_dir / name for name in texts)
