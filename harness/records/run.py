"""A run on disk: a folder of records, header, footer and observations; a reader reports everything that is missing.

[Note: what a run looks like] ``records.jsonl`` has one record per line and nothing else. ``run.jsonl`` has the header
as its first line and, once the run has ended, the footer as its second and last; without a footer the run was
interrupted. ``SHA256SUMS`` has the hashes of both files at the end of the run. A damaged line loses its content; the
run is then not whole. ``observations/`` contains the ranks' observations. Reports are written beside them. ``judged/``
is the result of judging the run again: a run of its own, with the header and the observations of the first.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.harness.errors import HarnessBug, NewerSchemaError, UsageError
from shardproof.harness.records.manifest import MANIFEST, changes, write_manifest
from shardproof.harness.records.record import Footer, Header, Line, Record, from_json, to_json
from shardproof.harness.regular_file import MOST_BYTES, open_regular, open_to_append, replace_regular

RECORDS = "records.jsonl"
RUN = "run.jsonl"
OBSERVATIONS = "observations"
JUDGED = "judged"

_UNKNOWN = "unknown"
_MADE_OF_EQUALS = ("laws", "ledger", "outcomes")
_MOSTLY_EQUAL = ("engine", "case", "world", "headline", "suite", "engine_version", "expectation", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as read; ``problems`` describe each difference from the files of a finished run.

    ``is_damaged``: bytes of its files changed after they were written, or a line cannot be read.
    """

    header: Header
    records: tuple[Record, ...]
    footer: Footer | None
    problems: tuple[str, ...] = ()
    is_damaged: bool = False

    @property
    def is_interrupted(self) -> bool:
        """Whether the run has no footer."""
        return self.footer is None


class RunWriter:
    """Writes a run as it proceeds; each appended record is on the disk and survives a crash."""

    def __init__(self, path: Path, header: Header) -> None:
        """Start the run in ``path``, created if missing; raises UsageError if there is a run already."""
        self.path = path
        self._is_finished = False
        # Hashes of what was written, not of the files: an engine can change these during the run.
        self._digests = {name: hashlib.sha256() for name in (RUN, RECORDS)}
        refuse_existing(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / RUN).touch(exist_ok=False)
            (path / RECORDS).touch(exist_ok=False)
        except OSError as error:
            raise _disk_error(path, error) from error
        try:
            self._append_line(RUN, to_json(header))
        except UsageError:  # without a header the folder is no run, and must not look like one
            for name in (RUN, RECORDS):
                (path / name).unlink()
            raise

    def append(self, record: Record) -> None:
        """Write one record and flush it to the disk."""
        self._refuse_after_footer()
        line = to_json(record)
        try:
            # A line that cannot be read back would make the whole run unreadable; fail now.
            from_json(Record, line, where=f"record of {record.engine} on {record.case}")
        except UsageError as error:
            raise HarnessBug(
                f"record of {record.engine} on {record.case} in {record.world}",
                expected="values of the types that the schema declares",
                got=str(error),
                hint="reporting this with the command line",
            ) from error
        self._append_line(RECORDS, line)

    def finish(self, footer: Footer) -> None:
        """Write the footer, which ends the run."""
        self._refuse_after_footer()
        if os.path.lexists(self.path / MANIFEST):
            raise UsageError(
                f"run {self.path}",
                expected=f"no {MANIFEST} before its end",
                got="one that an engine or another program put there",
                hint="looking at what the engine writes; the records are kept, and the run counts as interrupted",
            )
        self._append_line(RUN, to_json(footer))
        try:
            write_manifest(self.path, {name: found.hexdigest() for name, found in self._digests.items()})
        except OSError as error:
            raise _disk_error(self.path / MANIFEST, error) from error
        self._is_finished = True

    def _append_line(self, name: str, line: str) -> None:
        data = f"{line}\n".encode("ascii")
        _append(self.path / name, data)
        self._digests[name].update(data)

    def _refuse_after_footer(self) -> None:
        if self._is_finished:
            raise HarnessBug(
                f"run {self.path}", expected="nothing after the footer", got="more to write", hint="a new run"
            )


def refuse_existing(path: Path) -> None:
    """Raise UsageError with the names of the files if the folder holds a run: no measurement is overwritten."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"run {path}", expected="a folder", got="a file", hint="another --out")
    found = [name for name in (RUN, RECORDS) if (path / name).exists()]
    if (path / OBSERVATIONS).is_dir() and any((path / OBSERVATIONS).iterdir()):
        found.append(f"{OBSERVATIONS}/")
    if found:
        raise UsageError(
            f"run {path}", expected="no run there yet", got=", ".join(found), hint="another --out"
        )


def read_run(path: Path) -> Run:
    """Read and check a run; damaged parts are left out and listed in its problems.

    Raises UsageError for a folder without the files of a run, without a complete line in them, or of a later release.
    """
    damage: list[str] = []
    ends = list(_lines(path, RUN))
    records = tuple(_with_shared_parts(_readable(Record, path / RECORDS, _lines(path, RECORDS), damage)))
    header, footer = _read_ends(path / RUN, ends, records, damage)
    damage += _changed(path, footer)
    problems = dict.fromkeys((*header.shortfalls, *damage, *_miscounts(header, records, footer)))
    return Run(
        header=header,
        records=records,
        footer=footer,
        problems=tuple(problems),
        is_damaged=bool(damage),
    )


def write_file(path: Path, text: str) -> None:
    """Write a whole file atomically: readers see the old text or the new one."""
    try:
        # An engine's message may contain half a surrogate pair, which has no UTF-8.
        replace_regular(path, text.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise _disk_error(path, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _RawLine:
    text: str
    is_ended: bool  # by a newline

    @property
    def is_cut_off(self) -> bool:
        """Whether a write stopped inside this line; no proper prefix of a JSON object is JSON."""
        if self.is_ended:
            return False
        try:
            json.loads(self.text)
        except (ValueError, RecursionError):
            return True
        return False


def _append(path: Path, data: bytes) -> None:
    try:
        # Opened for each line: no file stays open over a fork, and an append is one write of a whole line.
        with open_to_append(path) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                written = file.write(data)
                if written != len(data):  # a full disk writes fewer bytes before it raises
                    raise OSError(f"only {written} of {len(data)} bytes were taken; is the disk full?")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # or the next line would continue half of this one
                raise
    except OSError as error:
        raise _disk_error(path, error) from error


def _disk_error(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"writing {path}",
        expected="a writable folder with room",
        got=f"{type(error).__name__}: {error}",
        hint="freeing space, or another --out; what was written before is intact",
    )


def _lines(path: Path, name: str) -> Iterator[_RawLine]:
    """Read a file line by line: a run may be too large for memory together with its records."""
    try:
        with open_regular(path / name) as file:
            while raw := file.readline(MOST_BYTES):  # of bytes, whose lines end at \n alone
                # Lines are ASCII; other bytes become escapes that the error can quote.
                text = raw.removesuffix(b"\n").decode("ascii", "backslashreplace")
                yield _RawLine(text=text, is_ended=raw.endswith(b"\n"))
    except OSError as error:
        got = "no such folder" if not path.exists() else f"{type(error).__name__}: {error.strerror}"
        raise UsageError(
            f"run {path}", expected=f"a folder with {name}", got=got, hint="the folder given to --out"
        ) from error


def _readable(kind: type[Line], file: Path, lines: Iterable[_RawLine], damage: list[str]) -> Iterator[Line]:
    """Return the readable lines, and report the others."""
    for number, line in enumerate(lines, start=1):
        if line.is_cut_off:
            damage.append(
                f"{file.name}:{number}: the last line is cut off and was skipped (interrupted write)"
            )
            continue
        try:
            yield from_json(kind, line.text, where=f"{file}:{number}")
        except UsageError as error:
            damage.append(
                f"{file.name}:{number}: damaged, skipped: expected {error.expected}, got {error.got}"
            )


def _with_shared_parts(records: Iterable[Record]) -> Iterator[Record]:
    """Let records share equal parts, such as most laws, ledgers and names."""
    known: dict[Any, Any] = {}  # Any: parts of several types, each hashable
    for record in records:
        parts = {name: getattr(record, name) for name in _MOSTLY_EQUAL}
        parts |= {
            name: tuple(known.setdefault(p, p) for p in getattr(record, name)) for name in _MADE_OF_EQUALS
        }
        yield replace(record, **{name: known.setdefault(part, part) for name, part in parts.items()})


def _read_ends(
    file: Path, lines: Sequence[_RawLine], records: Sequence[Record], damage: list[str]
) -> tuple[Header, Footer | None]:
    if len(lines) > 2:
        damage.append(f"{file.name}:3: {len(lines) - 2} more lines after the footer, skipped")
    header = _header(file, lines, records, damage)
    if len(lines) > 1 and lines[1].is_cut_off:
        damage.append(f"{file.name}:2: the footer is cut off; the run counts as interrupted")
        return header, None
    problems: list[str] = []
    footer = next(_readable(Footer, file, lines[1:2], problems), None)
    damage += [problem.replace(f"{file.name}:1:", f"{file.name}:2:", 1) for problem in problems]
    return header, footer


def _header(file: Path, lines: Sequence[_RawLine], records: Sequence[Record], damage: list[str]) -> Header:
    """Read the header; if it is damaged, return one that is derived from the records."""
    try:
        return from_json(Header, lines[0].text if lines else "", where=f"{file}:1")
    except NewerSchemaError:
        raise
    except UsageError as error:
        if not records:
            raise
        damage.append(f"{file.name}:1: damaged, skipped: expected {error.expected}, got {error.got}")
    return Header(
        started_at=_UNKNOWN,
        command=_UNKNOWN,
        engines=tuple(dict.fromkeys(record.engine for record in records)),
        worlds=tuple(dict.fromkeys(record.world for record in records)),
        versions={},
        hardware={},
        git_head=_UNKNOWN,
        git_dirty=False,
        seed=0,
        num_cases=len(records),
    )


def _changed(path: Path, footer: Footer | None) -> list[str]:
    """List files that changed since the run ended; unknown for a run without a footer."""
    if not (path / MANIFEST).exists() and footer is None:
        return []
    return [f"{name}: {why}" for name, why in changes(path).items()]


def _miscounts(header: Header, records: Sequence[Record], footer: Footer | None) -> list[str]:
    found = []
    times = Counter(record.key for record in records)
    for (engine, case, world), count in times.items():
        if count > 1:
            found.append(f"{count} records of {engine} on {case} in {world}; expected one")
    num_others = (
        sum(out.was_selected for out in footer.left_out) + footer.num_beyond if footer is not None else 0
    )
    if footer is not None and len(times) + num_others != header.num_cases:
        found.append(f"the header announces {header.num_cases} cases; there are records of {len(times)}")
    counted = sum(footer.counts.values()) if footer is not None else 0
    if counted and counted != len(records):
        found.append(f"the footer counts {counted} records; there are {len(records)}")
    return found
