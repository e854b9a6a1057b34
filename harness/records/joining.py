"""Joining runs: whether their settings are equal, and moving a record with its observations from one to another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from shardproof.harness.errors import UsageError
from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.record import Expectation, Header, Record, Verdict
from shardproof.harness.records.run import OBSERVATIONS

_QUIET = frozenset({Verdict.PASSED, Verdict.UNSUPPORTED})


def refuse_unlike(one: ComparedRun, other: ComparedRun) -> None:
    """Raise UsageError unless both runs were made by the same code, with the same seeds and known failures."""
    for what, was, now in _differences(one.run.header, other.run.header):
        raise UsageError(
            f"run {other.folder}",
            expected=f"{what} as in {one.folder}, {was}",
            got=now,
            hint="runs that were made alike, or `shardproof diff` to compare these two",
        )
    for header, folder in ((one.run.header, one.folder), (other.run.header, other.folder)):
        if not header.versions or (header.git_dirty and not header.git_changes):
            raise UsageError(
                f"run {folder}",
                expected="a header that says which code made it",
                got="changed files without a hash of the changes" if header.versions else "a damaged header",
                hint="running it again from a commit",
            )


def refuse_other_cases(one: ComparedRun, other: ComparedRun) -> None:
    """Raise UsageError unless both runs judge the same cases of the same engines in the same worlds."""
    headers = one.run.header, other.run.header
    was, now = ({"engines": " ".join(h.engines), "worlds": " ".join(h.worlds), **h.options} for h in headers)
    for name in dict.fromkeys((*was, *now)):
        if was.get(name) != now.get(name):
            raise UsageError(
                f"run {one.folder}",
                expected=f"the {name} of {other.folder}, {now.get(name, 'none')}",
                got=was.get(name, "none"),
                hint=f"the options of that run: {one.run.header.command}",
            )


def carried(record: Record, source: Path, target: Path, name: str) -> Record:
    """Return a record of the run in ``source`` with its paths in ``target``.

    The observations of a failure are copied, below a folder of that ``name``; others are not. A path that leaves the
    observations of its run is dropped.
    """
    parts = PurePosixPath(record.observation).parts
    observed = source / record.observation
    if len(parts) < 3 or parts[0] != OBSERVATIONS or ".." in parts or not observed.is_dir():
        return replace(record, observation="")
    if record.verdict in _QUIET:
        return replace(record, observation=os.path.relpath(observed, target))
    place = PurePosixPath(OBSERVATIONS, f"{name}-{parts[1]}", *parts[2:])
    # Two cases of one run may share observations; links are copied as links, so nothing outside is read.
    shutil.copytree(observed, target / place, symlinks=True, dirs_exist_ok=True, ignore=_no_files)
    return replace(record, observation=str(place))


def _no_files(folder: str, names: list[str]) -> set[str]:
    """Return the names of pipes, sockets and devices: copying one may never end."""
    paths = ((name, Path(folder, name)) for name in names)
    return {name for name, path in paths if not (path.is_symlink() or path.is_dir() or path.is_file())}


def _differences(one: Header, other: Header) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each difference, with both values."""
    for name in dict.fromkeys((*one.versions, *other.versions)):
        was, now = (f"{name} {header.versions.get(name, 'unknown')}" for header in (one, other))
        if was != now:
            yield "the versions", was, now
    now_set = _settings(other)
    for name, was in _settings(one).items():
        if was != now_set[name]:
            yield name, was, now_set[name]
    if _entries(one) != _entries(other):
        yield "the known failures", _counted(one), _counted(other)


def _settings(header: Header) -> dict[str, str]:
    changes = f" with changed files ({header.git_changes})" if header.git_dirty else ""
    return {
        "the schema": f"schema {header.schema}",
        "the commit": header.git_head[:12] + changes,
        "the schedule seed": f"schedule seed {header.seed}",
        "the number of schedules": f"{header.num_schedules} schedules",
        "the effort": "--thorough" if header.is_thorough else "no --thorough",
        "the hash seeds": f"hash seeds {list(header.hash_seeds)}",
    }


def _entries(header: Header) -> tuple[Expectation, ...] | None:
    return None if header.expectations is None else header.expectations.entries


def _counted(header: Header) -> str:
    entries = _entries(header)
    return "none, raw verdicts" if entries is None else f"{len(entries)} entries of known failures"
