"""A run on disk: a folder of records, header, footer and observations, written append-safe, read strictly.

[Note: what a run looks like]
``records.jsonl`` has one record per line and nothing else. ``run.jsonl`` has the header as its first line
and, once the run has ended, the footer as its second and last; without a footer the run was interrupted.
``observations/`` holds what the ranks saw. Reports are written beside them. ``judged/`` is the result of judging the
run again: a run of its own, with the header of the first and with the observations of the first.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessBug, UsageError
from harness.record import Footer, Header, Record, from_json, to_json

__all__ = [
    "JUDGED",
    "OBSERVATIONS",
    "RECORDS",
    "RUN",
    "Run",
    "RunWriter",
    "read_run",
    "refuse_existing",
    "write_file",
]

RECORDS = "records.jsonl"
RUN = "run.jsonl"
OBSERVATIONS = "observations"
JUDGED = "judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as read; ``problems`` say in words where the files are not what a finished run leaves."""

    header: Header
    records: tuple[Record, ...]
    footer: Footer | None
    problems: tuple[str, ...] = ()

    @property
    def is_interrupted(self) -> bool:
        """Whether the run never came to its end."""
        return self.footer is None


class RunWriter:
    """Writes a run while it happens; whatever was appended is on the disk and survives a crash."""

    def __init__(self, path: Path, header: Header) -> None:
        """Start the run in ``path``, created if missing; raises UsageError if there is a run already."""
        self.path = path
        self._is_finished = False
        refuse_existing(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / RUN).touch(exist_ok=False)
            (path / RECORDS).touch(exist_ok=False)
        except OSError as error:
            raise _disk_error(path, error) from error
        _append_line(path / RUN, to_json(header))

    def append(self, record: Record) -> None:
        """Write one record and wait until the disk has it."""
        self._refuse_after_footer()
        line = to_json(record)
        try:
            # One line that cannot be read back would cost the whole run later; better to hear of it now.
            from_json(Record, line, where=f"record of {record.engine} on {record.case}")
        except UsageError as error:
            raise HarnessBug(
                f"record of {record.engine} on {record.case} in {record.world}",
                expected="values of the types that the schema declares",
                got=str(error),
                hint="reporting this with the command line",
            ) from error
        _append_line(self.path / RECORDS, line)

    def finish(self, footer: Footer) -> None:
        """Write the footer; nothing may follow it."""
        self._refuse_after_footer()
        _append_line(self.path / RUN, to_json(footer))
        self._is_finished = True

    def _refuse_after_footer(self) -> None:
        if self._is_finished:
            raise HarnessBug(
                f"run {self.path}", expected="nothing after the footer", got="more to write", hint="a new run"
            )


def refuse_existing(path: Path) -> None:
    """Raise UsageError where a run is kept already, naming its files: nothing measured is ever overwritten."""
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
    """Read and check a run; a line cut off at the end is a problem, anything else broken a UsageError."""
    header, footer, problems = _read_ends(path / RUN, _lines(path, RUN))
    records: list[Record] = []
    for number, line in enumerate(lines := _lines(path, RECORDS), start=1):
        where = f"{path / RECORDS}:{number}"
        if number == len(lines) and line.is_cut_off:
            problems.append(
                f"{RECORDS}:{number}: the last line is cut off and was skipped (interrupted write)"
            )
        else:
            records.append(from_json(Record, line.text, where=where))
    problems += _miscounts(header, records, footer)
    known = dict.fromkeys((*header.shortfalls, *problems))
    return Run(header=header, records=tuple(records), footer=footer, problems=tuple(known))


def write_file(path: Path, text: str) -> None:
    """Write a whole file at once: readers see the old text or the new, never a part."""
    # Not tempfile: its files are private to the user, and a report is there to be shared.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with scratch.open("wb") as file:
            # An engine's message may hold half a surrogate pair, which has no UTF-8.
            file.write(text.encode("utf-8", errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise _disk_error(path, error) from error
    finally:
        scratch.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RawLine:
    text: str
    is_ended: bool  # by a newline

    @property
    def is_cut_off(self) -> bool:
        """Whether a write stopped inside this line; a part of a JSON object is never JSON itself."""
        if self.is_ended:
            return False
        try:
            json.loads(self.text)
        except (ValueError, RecursionError):
            return True
        return False


def _append_line(path: Path, line: str) -> None:
    data = f"{line}\n".encode("ascii")
    try:
        # Opened for each line: no file stays open over a fork, and an append is one write of a whole line.
        with path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                written = file.write(data)
                if written != len(data):  # how a full disk shows before it raises
                    raise OSError(f"only {written} of {len(data)} bytes were taken; is the disk full?")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # else the next line would be glued to half of this one
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


def _lines(path: Path, name: str) -> Sequence[_RawLine]:
    file = path / name
    try:
        data = file.read_bytes()
    except OSError as error:
        got = "no such folder" if not path.exists() else f"{type(error).__name__}: {error.strerror}"
        raise UsageError(
            f"run {path}", expected=f"a folder with {name}", got=got, hint="the folder given to --out"
        ) from error
    *ended, rest = data.split(b"\n")  # not splitlines, which also ends lines at other characters
    # Lines are ASCII; whatever is not, survives as an escape that the error can quote.
    lines = [_RawLine(text=raw.decode("ascii", "backslashreplace"), is_ended=True) for raw in ended]
    if rest:
        lines.append(_RawLine(text=rest.decode("ascii", "backslashreplace"), is_ended=False))
    return lines


def _read_ends(path: Path, lines: Sequence[_RawLine]) -> tuple[Header, Footer | None, list[str]]:
    header = from_json(Header, lines[0].text if lines else "", where=f"{path}:1")
    if len(lines) > 2:
        raise UsageError(
            f"{path}:3",
            expected="nothing after the footer",
            got=f"{len(lines) - 2} more lines",
            hint="shardproof merge, if two runs were put together by hand",
        )
    if len(lines) < 2:
        return header, None, []
    if lines[1].is_cut_off:
        return header, None, [f"{path.name}:2: the footer is cut off; the run counts as interrupted"]
    return header, from_json(Footer, lines[1].text, where=f"{path}:2"), []


def _miscounts(header: Header, records: Sequence[Record], footer: Footer | None) -> list[str]:
    found = []
    times = Counter((record.engine, record.case, record.world) for record in records)
    for (engine, case, world), count in times.items():
        if count > 1:
            found.append(f"{count} records of {engine} on {case} in {world}; expected one")
    if footer is not None and len(times) != header.num_cases:
        found.append(f"the header announces {header.num_cases} cases; records tell of {len(times)}")
    counted = sum(footer.counts.values()) if footer is not None else 0
    if counted and counted != len(records):
        found.append(f"the footer counts {counted} records; there are {len(records)}")
    return found
