"""Expectations compared with a run: entries that no longer hold, and failures without an entry. Values in and out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from shardproof.harness.records.record import Expectation, Expectations, Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.harness.verdicts.known_failures import expected, matches
from shardproof.harness.verdicts.known_failures_file import EXPECTABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Outdated:
    """An entry, by its place among all, that passed or is stale; ``still`` are its cases that fail, with the worlds."""

    place: int
    why: str
    still: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCause:
    """Failures that no entry excuses and that look alike: one engine, release, verdict, and set of broken laws."""

    engine: str
    version: str
    verdict: Verdict
    shows: tuple[str, ...]
    cases: tuple[tuple[str, str], ...]  # each with its world


def judged_by(run: Run, known: Expectations) -> tuple[Record, ...]:
    """Return the records of a run that was made without expectations, with the verdicts by these."""
    return (
        run.records if run.header.expectations is not None else tuple(expected(r, known) for r in run.records)
    )


def outdated(records: Sequence[Record], run: Run, known: Expectations) -> Iterator[Outdated]:
    """Yield the entries to remove or to narrow."""
    unused = run.footer.unused if run.footer is not None else ()
    stale = {found.expectation: found.why for found in unused if found.is_stale}
    for place, entry in enumerate(known.entries):
        borne = [record for record in records if record.expectation == entry]
        passed = [record for record in borne if record.verdict is Verdict.UNEXPECTED_PASS]
        if entry in stale:
            yield Outdated(place=place, why=stale[entry])
        elif passed:
            failed = [record for record in borne if record.verdict is Verdict.KNOWN_FAILURE]
            worlds = ", ".join(dict.fromkeys(record.world for record in passed))
            why = f"{len(passed)} of {len(borne)} records passed, in {worlds}"
            yield Outdated(place=place, why=why, still=tuple(_still(entry, passed, failed)))


def new_causes(records: Sequence[Record], *, engines: Sequence[str], case: str) -> tuple[NewCause, ...]:
    """Group the failures that no entry excuses; no engines mean all, ``case`` is a glob."""
    causes: dict[NewCause, list[tuple[str, str]]] = {}
    for record in records:
        is_asked = (not engines or record.engine in engines) and matches(case, record.case)
        if is_asked and record.verdict in EXPECTABLE:
            cause = NewCause(
                engine=record.engine,
                version=_release(record.engine_version),
                verdict=record.verdict,
                shows=_shown(record),
                cases=(),
            )
            causes.setdefault(cause, []).append((record.case, record.world))
    return tuple(replace(cause, cases=tuple(sorted(cases))) for cause, cases in causes.items())


def _still(
    entry: Expectation, passed: Sequence[Record], failed: Sequence[Record]
) -> Iterator[tuple[str, str]]:
    """Yield the cases that still fail; a case that passes in no world keeps all worlds of its entry."""
    mended = {record.case for record in passed}
    yield from dict.fromkeys((r.case, r.world if r.case in mended else entry.world) for r in failed)


def _release(engine_version: str) -> str:
    """Return the condition that only this release meets; empty if its version cannot be read."""
    name, _, version = engine_version.rpartition(" ")
    try:
        return f"{name} =={Version(version).public}" if name else ""
    except InvalidVersion:
        return ""


def _shown(record: Record) -> tuple[str, ...]:
    """Return globs for what a record shows: its broken laws, or its headline where no law was judged."""
    if laws := tuple(dict.fromkeys(law.law for law in record.laws if not law.held)):
        return laws
    # A note on the expectation precedes the headline proper, which follows the last "; ".
    if record.expectation is not None:
        return (f"*{record.headline.rpartition('; ')[2]}",)
    return (record.headline,)
