"""The text of a file of known failures without outdated entries, and with new ones.

Comments and order are kept. Whole entries are cut out as text, so that a comment above the next entry is not lost with
them; cases of an entry and new entries are written by tomlkit. The result is parsed again before it is written.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.items

from shardproof.harness.errors import HarnessBug
from shardproof.harness.records.provenance import today
from shardproof.harness.records.record import Expectation, Expectations, Verdict
from shardproof.harness.verdicts import known_failures_file
from shardproof.harness.verdicts.known_failures_update import NewCause, Outdated

_TABLE = "[[expectation]]"


def without(text: str, known: Expectations, gone: Sequence[Outdated]) -> str:
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


def new_table(cause: NewCause, *, reason: str, link: str, expiry: date) -> str:
    """Return the text of an entry for failures of one cause."""
    table = tomlkit.table()
    table["engine"] = cause.engine
    if cause.version:
        table["version"] = cause.version
    if cause.verdict is not Verdict.FAILED:
        table["verdict"] = str(cause.verdict)
    table["shows"] = cause.shows[0] if len(cause.shows) == 1 else list(cause.shows)
    table["reason"] = reason
    table["link"] = link
    table["expiry"] = expiry
    table["cases"] = _array([{"case": case, "world": world} for case, world in cause.cases])
    tables = tomlkit.aot()
    tables.append(table)
    return "\n" + tomlkit.dumps({"expectation": tables})


def check_entries(
    text: str, known: Expectations, gone: Sequence[Outdated], causes: Sequence[NewCause]
) -> None:
    """Read the new text, and raise HarnessBug unless its entries are exactly the intended ones."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "known_failures.toml"
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
