"""The file of known failures: TOML in, checked entries out; ``known_failures`` applies them to verdicts.

A table is one cause: its reason, link and expiry stand once, and ``cases`` lists the cases that show it. A case that
differs from the table in engine, release, world, verdict or broken laws is an inline table with these keys. Each case
becomes one `Expectation`; those of one table share its number.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from shardproof.engine.registry import known_engines
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Expectation, Expectations, Verdict
from shardproof.harness.regular_file import read_regular
from shardproof.harness.verdicts.known_failures import check_condition, matches
from shardproof.harness.worlds.spec import MAX_RANKS, WorldKind

SHIPPED = SUITES / "known_failures.toml"

_TABLE = "expectation"
_REQUIRED = ("engine", "case", "shows", "reason", "link", "expiry")
_OPTIONAL = ("version", "world", "verdict")
_CASES = "cases"
_OF_A_CASE = ("case", "engine", "version", "world", "verdict", "shows")
# The verdicts of known failures. PASSED and UNSUPPORTED conform; the rest prove nothing about an engine.
EXPECTABLE = (Verdict.FAILED, Verdict.HUNG, Verdict.CRASHED, Verdict.UNSUPPORTED_SILENT)


def find(named: str | None) -> Path | None:
    """Return the file that the user named, else the one that ships with the suites, else None."""
    if named is not None:
        return Path(named)
    return SHIPPED if SHIPPED.exists() else None


def read(file: Path, *, today: date) -> Expectations:
    """Read and check a file; raises UsageError with the wrong entry and what is expected there."""
    tables = _tables(file)
    entries = tuple(
        _entry(number, row, what)
        for number, table in enumerate(tables, start=1)
        for what, row in _rows(table, f"{file}: {_TABLE} {number}")
    )
    return Expectations(source=str(file), today=today.isoformat(), entries=entries)


# Any, from here on: TOML before it is checked.
def _tables(file: Path) -> list[Any]:
    try:
        text = read_regular(file).decode("utf-8")
        plain = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UsageError(
            f"expectations {file}", expected="a file", got="none there", hint="the path that was meant"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not TOML
        raise UsageError(
            f"expectations {file}",
            expected="a readable TOML file",
            got=f"{type(error).__name__}: {error}",
            hint="the example in docs/known-failures.md",
        ) from error
    for key in plain.keys() - {_TABLE}:
        raise UsageError(
            f"{file}: {key}", expected=f"only [[{_TABLE}]]", got=f"{key!r}", hint=f"[[{_TABLE}]]"
        )
    tables = plain.get(_TABLE, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(
            f"{file}: {_TABLE}",
            expected=f"a list of tables, each headed [[{_TABLE}]]",
            got=f"[{_TABLE}]" if isinstance(tables, dict) else repr(tables),
            hint="two brackets",
        )
    return tables


def _rows(table: Mapping[str, Any], what: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a flat table for each case of a cause, with its name in messages."""
    if _CASES not in table:
        yield what, table
        return
    cases = table[_CASES]
    if "case" in table or not isinstance(cases, list) or not cases:
        raise UsageError(
            f"{what}: {_CASES}",
            expected="either `case`, or `cases` with a list of cases",
            got="both" if "case" in table else repr(cases),
            hint='cases = ["parity/test_exact.py::test_sums", { case = "smoke/*", world = "*:1" }]',
        )
    shared = {key: value for key, value in table.items() if key != _CASES}
    for place, case in enumerate(cases, start=1):
        row = {"case": case} if isinstance(case, str) else case
        if not isinstance(row, dict) or "case" not in row or not row.keys() <= set(_OF_A_CASE):
            raise UsageError(
                f"{what}: case {place}",
                expected=f"the id of a case, or a table of `case` and any of {', '.join(_OF_A_CASE[1:])}",
                got=repr(case),
                hint='{ case = "smoke/*", world = "*:1" }',
            )
        yield f"{what}, case {place}", shared | row


def _entry(number: int, table: Mapping[str, Any], what: str) -> Expectation:
    _check_keys(table, what)
    return Expectation(
        number=number,
        engine=_engine(table, what),
        version=_version(table, what),
        case=_case(table, what),
        world=_world(table, what),
        verdict=_verdict(table, what),
        reason=_text(table, "reason", what),
        link=_link(table, what),
        expiry=_expiry(table, what),
        shows=_shows(table, what),
    )


def _check_keys(table: Mapping[str, Any], what: str) -> None:
    known = (*_REQUIRED, *_OPTIONAL, _CASES)
    for key in sorted(table.keys() - set(known)):
        raise UsageError(what, expected=f"the keys {', '.join(known)}", got=repr(key), hint=_near(key, known))
    for key in _REQUIRED:
        if key not in table:
            given = ", ".join(table) or "nothing"
            raise UsageError(what, expected=f"the key {key!r}", got=given, hint=f"{key} = ...")


def _text(table: Mapping[str, Any], key: str, what: str, *, default: str = "") -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or (key in table and not value.strip()):
        raise UsageError(
            f"{what}: {key}", expected="a text that says something", got=repr(value), hint=f'{key} = "..."'
        )
    return value


def _engine(table: Mapping[str, Any], what: str) -> str:
    name = _text(table, "engine", what)
    # A user's engine is not loaded here: the file may serve runs without it.
    if name not in known_engines() and ":" not in name:
        raise UsageError(
            f"{what}: engine",
            expected=f"the name given to --engine ({', '.join(sorted(known_engines()))}, or one with a colon)",
            got=repr(name),
            hint=_near(name, known_engines()),
        )
    return name


def _version(table: Mapping[str, Any], what: str) -> str:
    condition = _text(table, "version", what)
    if condition:
        check_condition(condition, f"{what}: version")
    return condition


def _case(table: Mapping[str, Any], what: str) -> str:
    pattern = _text(table, "case", what)
    if pattern.startswith("suites/"):
        raise UsageError(
            f"{what}: case",
            expected="the id of a case as in its record",
            got=repr(pattern),
            hint=repr(pattern.removeprefix("suites/")),
        )
    return pattern


def _world(table: Mapping[str, Any], what: str) -> str:
    pattern = _text(table, "world", what, default="*")
    sizes = (*range(1, MAX_RANKS + 1), *(2**n for n in range(7, 17)))
    named = [part for part in pattern.split(":")[2:] if part.isidentifier()]  # else any device will do
    devices = ("", f":{(named or ['cuda'])[0]}")
    spellings = (f"{kind}:{size}{device}" for kind in WorldKind for size in sizes for device in devices)
    if not any(matches(pattern, spelling) for spelling in spellings):
        raise UsageError(
            f"{what}: world",
            expected="a glob on KIND:SIZE or KIND:SIZE:DEVICE",
            got=repr(pattern),
            hint="'threads:*', '*:1' or '!*:1'",
        )
    return pattern


def _verdict(table: Mapping[str, Any], what: str) -> Verdict:
    name = _text(table, "verdict", what, default=Verdict.FAILED)
    if name not in EXPECTABLE:
        raise UsageError(
            f"{what}: verdict",
            expected=f"one of {', '.join(EXPECTABLE)}",
            got=repr(name),
            hint=_near(name, EXPECTABLE),
        )
    return Verdict(name)


def _shows(table: Mapping[str, Any], what: str) -> tuple[str, ...]:
    value = table["shows"]
    globs = value if isinstance(value, list) else [value]
    if not globs or not all(isinstance(glob, str) and glob.strip() for glob in globs):
        raise UsageError(
            f"{what}: shows",
            expected="globs that each broken law matches, or the headline where no law is judged",
            got=repr(value),
            hint='shows = "matches the oracle", or a list of such',
        )
    return tuple(globs)


def _link(table: Mapping[str, Any], what: str) -> str:
    link = _text(table, "link", what)
    if not re.fullmatch(r"https?://[^\s<>\"'`|\\]+", link):
        raise UsageError(
            f"{what}: link",
            expected="the address of a public report",
            got=repr(link),
            hint="https://github.com/OWNER/REPOSITORY/issues/NUMBER",
        )
    return link


def _expiry(table: Mapping[str, Any], what: str) -> str:
    value = table["expiry"]
    if type(value) is not date:  # a time of day is a date to Python too
        raise UsageError(
            f"{what}: expiry",
            expected="a date without quotes",
            got=repr(value) if isinstance(value, str) else str(value),
            hint="expiry = 2027-01-31",
        )
    return value.isoformat()


def _near(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    return repr(near[0]) if near else f"one of {', '.join(sorted(names))}"
