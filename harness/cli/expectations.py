"""The command ``shardproof expectations``: update the file of known failures from a run, as a diff to review.

Comments and order are kept. Whole entries are cut out as text, so that a comment above the next entry is not lost with
them; cases of an entry and new entries are written by tomlkit. The result is parsed again before it is written.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.items

from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.errors import HarnessBug, UsageError
from shardproof.harness.records.provenance import today
from shardproof.harness.records.record import Expectation, Expectations, Verdict
from shardproof.harness.records.run import Run, read_run, write_file
from shardproof.harness.verdicts import known_failures_file
from shardproof.harness.verdicts.known_failures_update import (
    NewCause,
    Outdated,
    judged_by,
    new_causes,
    outdated,
)

__all__ = ["UpdateRequest", "update"]

_TABLE = "[[expectation]]"
_TERM = timedelta(days=90)  # a quarter: long enough for a fix to be released, short enough for a review
_ASKED = "?"  # a placeholder for a value that the caller must set


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """The run to follow, the file to write, and the texts of new entries."""

    run: Path
    file: str | None
    is_written: bool
    reason: str = ""
    link: str = ""
    expiry: str = ""
    engines: tuple[str, ...] = ()
    case: str = "*"


def update(request: UpdateRequest) -> int:
    """Print the change of the file, and write it on request; returns 1 if something remains to be done, else 0."""
    run = read_run(request.run)
    if run.is_damaged:
        raise UsageError(
            f"run {request.run}", expected="whole files", got=run.problems[0], hint="running it again"
        )
    file = _file(request, run)
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    known = _known(file, run)
    records = judged_by(run, known)
    gone = list(outdated(records, run, known))
    causes = new_causes(records, engines=request.engines, case=request.case)
    text = _without(old, known, gone) + "".join(_new_table(cause, request) for cause in causes)
    print("".join(_diff(old, text, str(file))), end="")
    for outdated_entry in gone:
        print(f"{'narrowed' if outdated_entry.still else 'removed'}: {_named(known, outdated_entry)}")
    others = Counter(
        record.verdict
        for record in records
        if not record.verdict.is_conforming and not _is_treated(record.verdict)
    )
    for verdict, count in others.items():
        print(f"{count} {verdict}: no expectation can excuse this")
    if causes and not (request.reason and request.link):
        print(f"nothing is written: {sum(len(c.cases) for c in causes)} failures need --reason and --link")
        return DOES_NOT_CONFORM
    _check(text, known, gone, causes)
    if text != old and not request.is_written:
        print("nothing is written without --update")
        return DOES_NOT_CONFORM
    if text != old:
        write_file(file, text)
        print(f"wrote {file}")
    return DOES_NOT_CONFORM if others else CONFORMS


def _is_treated(verdict: Verdict) -> bool:
    return verdict in known_failures_file.EXPECTABLE or verdict is Verdict.UNEXPECTED_PASS


def _file(request: UpdateRequest, run: Run) -> Path:
    if request.file is not None:
        return Path(request.file)
    if run.header.expectations is not None:
        return Path(run.header.expectations.source)
    found = known_failures_file.find(None)
    if found is None:
        raise UsageError("--expectations", expected="a file", got="none", hint="--expectations known.toml")
    return found


def _known(file: Path, run: Run) -> Expectations:
    """Read the current file; raises UsageError if the run was made with other entries."""
    day = today()
    if not file.exists():
        known = Expectations(source=str(file), today=day.isoformat(), entries=())
    else:
        known = known_failures_file.read(file, today=day)
    made_with = run.header.expectations
    if made_with is not None and made_with.entries != known.entries:
        raise UsageError(
            f"expectations {file}",
            expected=f"the {len(made_with.entries)} entries that the run was made with",
            got=f"other ones, {len(known.entries)}",
            hint="running again with the file as it is now",
        )
    return known


def _named(known: Expectations, found: Outdated) -> str:
    entry = known.entries[found.place]
    return f"expectation {entry.number} ({entry.engine}, {entry.case}): {found.why}"


def _diff(old: str, new: str, name: str) -> Iterator[str]:
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    return difflib.unified_diff(before, after, fromfile=name, tofile=name)


def _without(text: str, known: Expectations, gone: Sequence[Outdated]) -> str:
    """Return the file without outdated entries; an entry some of whose cases still fail keeps those."""
    head, *tables = re.split(rf"^(?={re.escape(_TABLE)}[ \t]*(?:#.*)?$)", text, flags=re.MULTILINE)
    parts = [head]
    for number, table in enumerate(tables, start=1):
        places = [place for place, entry in enumerate(known.entries) if entry.number == number]
        found = {places.index(o.place): o for o in gone if o.place in places}
        # Comments and blank lines at the end of a table belong to the next one, and are kept.
        body, rest = _split_off_comments(table)
        if len(found) == len(places) and not any(o.still for o in found.values()):
            parts.append(rest.lstrip("\n"))
        else:
            parts.append((_narrowed(body, found) if found else body) + rest)
    return "".join(parts)


def _split_off_comments(table: str) -> tuple[str, str]:
    lines = table.splitlines(keepends=True)
    end = len(lines)
    while end and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return "".join(lines[:end]), "".join(lines[end:])


# Any, here and below: tomlkit's tables behave as dicts and lists, and are typed as any item.
def _narrowed(body: str, found: dict[int, Outdated]) -> str:
    document = tomlkit.parse(body)
    table: Any = document["expectation"][0]
    if "cases" not in table:
        rows = _rows(found[0], {})
        del table["case"]
        table.pop("world", None)
        table["cases"] = rows
        return document.as_string()
    for place in sorted(found, reverse=True):
        row = table["cases"][place]
        extra = {} if isinstance(row, str) else {k: v for k, v in row.items() if k not in {"case", "world"}}
        new = _rows(found[place], extra)
        del table["cases"][place]
        for item in reversed(new):
            table["cases"].insert(place, item)
    return document.as_string()


def _rows(found: Outdated, extra: dict[str, Any]) -> Any:
    return _array(
        [{"case": case, **extra, **({} if world == "*" else {"world": world})} for case, world in found.still]
    )


def _array(rows: Sequence[dict[str, Any]]) -> Any:
    array = tomlkit.array().multiline(True)
    for row in rows:
        item = tomlkit.inline_table()
        item.update(row)
        array.append(item)
    return array


def _new_table(cause: NewCause, request: UpdateRequest) -> str:
    table = tomlkit.table()
    table["engine"] = cause.engine
    if cause.version:
        table["version"] = cause.version
    if cause.verdict is not Verdict.FAILED:
        table["verdict"] = str(cause.verdict)
    table["shows"] = cause.shows[0] if len(cause.shows) == 1 else list(cause.shows)
    table["reason"] = request.reason or _ASKED
    table["link"] = request.link or _ASKED
    table["expiry"] = _expiry(request)
    table["cases"] = _array([{"case": case, "world": world} for case, world in cause.cases])
    tables = tomlkit.aot()
    tables.append(table)
    return "\n" + tomlkit.dumps({"expectation": tables})


def _expiry(request: UpdateRequest) -> date:
    try:
        return date.fromisoformat(request.expiry) if request.expiry else today() + _TERM
    except ValueError as error:
        raise UsageError(
            "--expiry", expected="a day", got=repr(request.expiry), hint=f"--expiry {today() + _TERM}"
        ) from error


def _check(text: str, known: Expectations, gone: Sequence[Outdated], causes: Sequence[NewCause]) -> None:
    """Read the new text, and raise HarnessBug unless its entries are exactly the intended ones."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "expectations.toml"
        file.write_text(text, encoding="utf-8")
        read = known_failures_file.read(file, today=today()).entries
    outdated_places = {found.place: found for found in gone}
    meant = []
    for place, entry in enumerate(known.entries):
        if place not in outdated_places:
            meant.append(entry)
        else:
            still = outdated_places[place].still
            meant += [replace(entry, case=case, world=world) for case, world in still]
    kept = read[: len(read) - sum(len(cause.cases) for cause in causes)]
    if [_essence(e) for e in kept] != [_essence(e) for e in meant]:
        raise HarnessBug(
            "writing expectations",
            expected=f"{len(meant)} entries of the old file",
            got=f"{len(kept)} others",
            hint="editing the file by hand, and reporting this",
        )


def _essence(entry: Expectation) -> Expectation:
    return replace(entry, number=0)  # its place in the file
