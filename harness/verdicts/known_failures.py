"""Apply the known failures to records: which entry excuses which verdict, and which entries match no case.

[Note: strict in both directions] An expectation excuses exactly the verdict and the broken laws that it lists, of the
cases that it names, until its expiry: a known failure must not hide another failure of the same case. A case that
passes despite an entry fails the run; otherwise the file would go on excusing failures that are long fixed. So does an
entry that matches no case; otherwise it would seem to excuse something. Only a run that collected every case can decide
this, because a selection leaves cases out. See ``unused``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import assert_never

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from shardproof.harness.cases.case_id import Catalogue
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Expectation, Expectations, Record, UnusedExpectation, Verdict


class Fit(Enum):
    """The relation between a condition and a release."""

    MEETS = "meets"  # the release meets the condition, or there is none
    MISSES = "misses"  # another release of the same engine would meet it
    NEVER = "never"  # no release could: another name, or an unreadable version


def check_condition(condition: str, what: str) -> None:
    """Raise a UsageError about ``what`` unless ``condition`` is a name with bounds on its version."""
    try:
        found = Requirement(condition)
    except InvalidRequirement as error:
        problem = str(error).splitlines()[0]
        raise _refusal(what, f"{condition!r} ({problem})") from error
    if not found.specifier or found.extras or found.marker or found.url:
        raise _refusal(what, repr(condition))


def fit(condition: str, release: str) -> Fit:
    """Compare a checked condition with the release that an engine reports."""
    if not condition:
        return Fit.MEETS
    wanted = Requirement(condition)
    name, _, version = release.rpartition(" ")
    try:
        found = Version(version)
    except InvalidVersion:
        return Fit.NEVER
    if canonicalize_name(name) != canonicalize_name(wanted.name):
        return Fit.NEVER
    # Nightlies are releases too: without this, no bound would ever hold of one.
    return Fit.MEETS if wanted.specifier.contains(found, prereleases=True) else Fit.MISSES


def _refusal(what: str, got: str) -> UsageError:
    return UsageError(
        what,
        expected="a name with bounds on its version",
        got=got,
        hint='"torch >=2.11,<2.15", or no `version` at all if every release fails',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The extent of a run: the cases that it collected, its worlds, and its records."""

    catalogue: Catalogue
    worlds: Sequence[str]
    records: Sequence[Record]


def expected(record: Record, expectations: Expectations | None) -> Record:
    """Return the record with the verdict that an expectation gives it; laws, tensors and ledger stay as evidence."""
    if expectations is None:
        return record
    concerned = [entry for entry in expectations.entries if _concerns(entry, record)]
    live = [entry for entry in concerned if not is_expired(entry, expectations.today)]
    for entry in live:
        if entry.verdict is record.verdict and not _unnamed(entry, record):
            inherited = "" if entry.engine == record.engine else f"{entry.engine} fails this case as well; "
            headline = inherited + record.headline
            return replace(record, verdict=Verdict.KNOWN_FAILURE, headline=headline, expectation=entry)
    # A derived engine may pass where the known engine fails.
    own = [entry for entry in live if entry.engine == record.engine]
    if record.verdict is Verdict.PASSED and own:
        headline = f"expected to be {own[0].verdict}, and passed: remove the expectation; {record.headline}"
        return replace(record, verdict=Verdict.UNEXPECTED_PASS, headline=headline, expectation=own[0])
    return record if record.verdict.is_conforming else _unexcused(record, live, concerned)


def containing(record: Record, expectations: Expectations | None, cases: Iterable[str]) -> Record:
    """Excuse the failure of a case that contains ``cases``, if the engine is known to fail one of these.

    Such a case judges the engines that pass them; what it would show of the others, cases without them show.
    """
    if expectations is None or record.verdict.is_conforming:
        return record
    for case in cases:
        for entry in expectations.entries:
            is_live = not is_expired(entry, expectations.today)
            if is_live and _concerns(entry, replace(record, case=case)):
                headline = f"contains {case}; {record.headline}"
                return replace(record, verdict=Verdict.KNOWN_FAILURE, headline=headline, expectation=entry)
    return record


def named_defect(record: Record, defects: Expectations | None) -> Record:
    """Prepend a known defect of the engine's release to the headline of a failure that shows it; excuses nothing.

    Of cases with a user's model: whether it meets a defect depends on the model.
    """
    if defects is None or record.verdict.is_conforming or record.expectation is not None:
        return record
    for entry in defects.entries:
        if entry.verdict is record.verdict and _concerns(entry, record) and not _unnamed(entry, record):
            known = f"known defect of {record.engine_version}: {entry.reason} ({entry.link})"
            return replace(record, headline=f"{known}; {record.headline}")
    return record


def is_expired(entry: Expectation, today: str) -> bool:
    """Return whether the last day of an expectation is past."""
    return today > entry.expiry  # both ISO 8601, which sorts as dates do


def matches(pattern: str, text: str) -> bool:
    """Match with ``*`` and ``?``; a leading ``!`` negates the rest.

    Brackets are literal, because many ids of cases contain them.
    """
    if pattern.startswith("!"):
        return not matches(pattern[1:], text)
    return fnmatchcase(text, pattern.replace("[", "[[]"))


def matches_world(pattern: str, world: str) -> bool:
    """Match the name of a world; a pattern without a device, such as ``*:2``, matches worlds on any device.

    Of several patterns, all have to match. The device of a world whose name has none is ``cpu`` to ``*:*:cpu``.
    """
    kind, size, *device = world.split(":")
    of_device = f"{kind}:{size}:{device[0] if device else 'cpu'}"

    def is_like(one: str) -> bool:
        if one.endswith(":cpu"):
            return matches(one, of_device)
        return matches(one, world if one.count(":") > 1 else f"{kind}:{size}")

    return all(map(is_like, pattern.split()))


def is_refused_throughout(entry: Expectation, records: Sequence[Record]) -> bool:
    """Return whether an entry applies to some records, and all of these are refusals."""
    return {record.verdict for record in records if _concerns(entry, record)} == {Verdict.UNSUPPORTED}


def unused(expectations: Expectations | None, ran: Ran) -> tuple[UnusedExpectation, ...]:
    """List the expectations of engines in the run that applied to no record; see [Note: strict in both directions].

    Entries of engines that took no part are not listed: one file serves runs of any engine.
    """
    if expectations is None:
        return ()
    by_engine: dict[str, list[Record]] = defaultdict(list)
    for record in ran.records:
        by_engine[record.engine].append(record)
    return tuple(
        found
        for entry in expectations.entries
        if entry.engine in by_engine
        and (found := _unused(entry, expectations.today, replace(ran, records=by_engine[entry.engine])))
    )


def _concerns(entry: Expectation, record: Record) -> bool:
    """Whether an entry names this case, for the engine itself or the known engine that it is derived from."""
    releases = {record.known_as: record.known_version, record.engine: record.engine_version}
    return (
        entry.engine in releases
        and matches(entry.case, record.case)
        and matches_world(entry.world, record.world)
        and fit(entry.version, releases[entry.engine]) is Fit.MEETS
    )


def _unnamed(entry: Expectation, record: Record) -> list[str]:
    """Return what an expectation does not cover of a record: broken laws, or the headline if no law was judged.

    A glob matches a law by its name, or by its name, a colon and what it found.
    """
    found = {law.law: f"{law.law}: {law.summary}" for law in record.laws if not law.held}
    seen = found or {record.headline: record.headline}
    return [
        name
        for name, whole in seen.items()
        if not any(matches(glob, text) for glob in entry.shows for text in (name, whole))
    ]


def _unexcused(record: Record, live: Sequence[Expectation], concerned: Sequence[Expectation]) -> Record:
    """Prepend to the headline why an expectation that names this case does not excuse it."""
    alike = next((entry for entry in live if entry.verdict is record.verdict), None)
    if alike is not None:
        named, unnamed = (", ".join(map(repr, texts)) for texts in (alike.shows, _unnamed(alike, record)))
        note = f"expectation excuses {named}, not {unnamed}"
        return replace(record, headline=f"{note}; {record.headline}", expectation=alike)
    if live:
        note = f"expectation says {live[0].verdict}, not {record.verdict}"
        return replace(record, headline=f"{note}; {record.headline}", expectation=live[0])
    for entry in concerned:
        if entry.verdict is record.verdict:
            note = f"expectation expired on {entry.expiry}"
            return replace(record, headline=f"{note}; {record.headline}", expectation=entry)
    return record


def _unused(entry: Expectation, today: str, ran: Ran) -> UnusedExpectation | None:
    """Return why an entry applied to none of its engine's records; None if it applied."""
    release = next((r.engine_version for r in ran.records if r.engine_version), "")
    if is_expired(entry, today):
        return _idle(entry, f"expired on {entry.expiry} and excuses nothing; renew or remove it")
    if not release:
        return _idle(entry, "no case of this engine came to a verdict")
    match fit(entry.version, release):
        case Fit.NEVER:
            why = f"no release can meet '{entry.version}': the engine calls itself '{release}'"
            return _idle(entry, why, is_stale=ran.catalogue.is_whole)
        case Fit.MISSES:
            return _idle(entry, f"'{entry.version}' does not hold of '{release}'")
        case Fit.MEETS:
            return _idle_on_cases(entry, ran)
        case other:
            assert_never(other)


def _idle_on_cases(entry: Expectation, ran: Ran) -> UnusedExpectation | None:
    is_whole = ran.catalogue.is_whole
    if not any(matches_world(entry.world, world) for world in ran.worlds):
        return _idle(entry, f"no world of this run is like '{entry.world}'")
    if not any(matches(entry.case, case) for case in ran.catalogue.cases):
        if is_whole:
            return _idle(entry, "no case has such an id: see `shardproof list --cases`", is_stale=True)
        return _idle(entry, "none of the cases selected has such an id")
    if not any(_concerns(entry, record) for record in ran.records):
        return _idle(entry, "its cases make no sense in these worlds, or were not reached")
    if is_refused_throughout(entry, ran.records):
        # The other shards may hold a case that the engine does not refuse; merging them shows it.
        is_stale = is_whole and not ran.catalogue.is_sharded
        return _idle(entry, "the engine refuses every such case: UNSUPPORTED", is_stale=is_stale)
    return None


def _idle(entry: Expectation, why: str, *, is_stale: bool = False) -> UnusedExpectation:
    return UnusedExpectation(expectation=entry, why=why, is_stale=is_stale)
