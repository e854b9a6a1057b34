"""Calls pytest on the suites for commands: with which folders, and with which settings."""

from __future__ import annotations

import difflib
import os
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def check_temporary_folder() -> None:
    """Raise UsageError if no temporary file can be written; pytest would end with a traceback."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UsageError(
            "the temporary folder",
            expected="one with room",
            got=str(error),
            hint="freeing space, or another folder in TMPDIR",
        ) from error


def call_pytest(arguments: Sequence[str], *plugins: object) -> int:
    """Run pytest in this process, from a clone or installed; returns its exit code."""
    import pytest  # here, because it takes a while and not every command needs it

    settings = ROOT / "pyproject.toml"
    # An installed package has no pytest settings; a clone has. Both leave out plugins that happen to be installed.
    own = ["--disable-plugin-autoload", "-p", "xdist.plugin", "-p", "pytest_timeout"]
    installed = ["-c", os.devnull, "--import-mode=importlib", *own]
    config = ["-c", str(settings)] if settings.exists() else installed
    try:
        code = pytest.main(
            [
                *("-p", "shardproof.harness.runner.plugin"),  # first: other plugins of ours build on it
                *arguments,
                *config,
                f"--rootdir={ROOT}",
                *("-p", "no:cacheprovider"),
                *("--no-header", "-q", "-rN"),
            ],
            plugins,
        )
    except (
        Exception
    ):  # as pytest ends, which warns of files that a killed worker left open; warnings are errors
        traceback.print_exc()
        code = pytest.ExitCode.INTERNAL_ERROR
    return int(code)


def suites(names: Sequence[str] | None) -> list[Path]:
    """Find suites by name, or all if there are no names; raises UsageError with a hint."""
    known = {folder.name: folder for folder in suite_folders()}
    for name in names or []:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"--suite {near[0]}" if near else "`shardproof list`"
            raise UsageError(
                "--suite", expected=f"one of {', '.join(sorted(known))}", got=repr(name), hint=hint
            )
    return [known[name] for name in names or sorted(known)]


def suite_folders() -> list[Path]:
    """List the folders with cases; a folder without any, such as the table of upstream tests, is no suite."""
    folders = sorted(p.parent for p in SUITES.glob("*/__init__.py"))
    return [folder for folder in folders if any(folder.glob("test_*.py"))]
