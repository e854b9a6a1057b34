"""Two runs compared: which records changed, and how. Pure, values in and values out.

[Note: what counts as a change] Records are matched by engine, case and world. Their verdicts, expectations, headlines,
broken laws, and the counts and bytes of their ledgers are compared. Durations, observations and commands are not
compared, and versions are context, because they differ in every upgrade.

A headline contains numbers that vary although nothing changed: call sites with line numbers, addresses, and measured
values of a tensor. The comparison ignores them. It keeps whole numbers, because they are counts, steps and ranks. Only
if a record passes in both runs and its communication changed, whole numbers follow from that change, which is listed
separately. The number of compared tensors is kept even then: a run that compares fewer tensors proves less.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from shardproof.harness.errors import UsageError
from shardproof.harness.records.diff.comparability import ComparedRun, Setting, settings_that_differ, warnings
from shardproof.harness.records.diff.traffic import TrafficChange, is_measured, traffic_changes
from shardproof.harness.records.record import Record, RecordKey, Verdict


class News(StrEnum):
    """The kinds of changes of a record, the most urgent first."""

    WORSE = "worse"  # from PASSED to anything else, from UNSUPPORTED to a failure, from a known failure to another
    BETTER = "better"  # the reverse
    OTHER_VERDICT = "other_verdict"  # a failure of another kind, or the same one with another expectation
    EXPLANATION = "explanation"  # the same verdict for another reason: headline or broken laws
    COMMUNICATION = "communication"  # counts, bytes or dtypes of collectives
    NEW = "new"  # in the second run only
    GONE = "gone"  # in the first run only


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChange:
    """The changes of one engine on one case in one world; ``news`` in the order of ``News``."""

    engine: str
    case: str
    world: str
    news: tuple[News, ...]
    before: Record | None  # None if new
    after: Record | None  # None if gone
    traffic: tuple[TrafficChange, ...] = ()

    @property
    def newly_broken(self) -> tuple[str, ...]:
        """Laws that are broken now and were not before."""
        return _without(broken_laws(self.after), broken_laws(self.before))

    @property
    def no_longer_broken(self) -> tuple[str, ...]:
        """Laws that were broken and are not now."""
        return _without(broken_laws(self.before), broken_laws(self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs, their context, and every record that changed."""

    before: ComparedRun
    after: ComparedRun
    changes: tuple[RecordChange, ...]
    num_unchanged: int
    num_unmeasured: int  # records in both whose communication was not compared, as a ledger is cut short
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def counts(self) -> Mapping[News, int]:
        """How many records have each kind of news; a record may have two."""
        return {news: sum(news in change.news for change in self.changes) for news in News}


def compare(before: ComparedRun, after: ComparedRun, *, engines: Sequence[str] = ()) -> Comparison:
    """Compare the records of ``engines``, all if empty; raises UsageError for an engine that neither run has."""
    _refuse_unknown(engines, (*before.engines, *after.engines))
    before, after = before.of(engines), after.of(engines)
    old, new = _by_key(before.run.records), _by_key(after.run.records)
    found = [_change(old.get(cell), new.get(cell)) for cell in sorted({*old, *new})]
    changes = tuple(change for change in found if change is not None)
    return Comparison(
        before=before,
        after=after,
        changes=changes,
        num_unchanged=len(found) - len(changes),
        num_unmeasured=sum(_is_unmeasured(old[cell], new[cell]) for cell in old.keys() & new.keys()),
        settings=settings_that_differ(before, after),
        warnings=warnings(before, after),
    )


def broken_laws(record: Record | None) -> tuple[str, ...]:
    """List the laws that a record broke."""
    return tuple(law.law for law in record.laws if not law.held) if record is not None else ()


def steady(headline: str) -> str:
    """Blank out what varies in a headline although nothing changed; see [Note: what counts as a change]."""
    for pattern, blank in _UNSTEADY:
        headline = pattern.sub(blank, headline)
    return headline


_UNSTEADY = (
    # The worst wrong element of a tensor: rounding decides which it is.
    (
        re.compile(
            r"at \[[\d, ]*\] got \S+, expected \S+, error \S+, allowed \S+, \S+% of the shard beyond",
        ),
        "at [...]",
    ),
    (re.compile(r"\b0x[0-9a-fA-F]+"), "0x..."),
    (re.compile(r"(\.(?:py|cpp|cu|h)):\d+"), r"\1:..."),
    (re.compile(r"(\", line) \d+"), r"\1 ..."),
    (re.compile(r"-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)"), "..."),
)

_COUNTED = re.compile(r"\b\d+\b(?! tensors)")

# An expectation changes what a run makes of a failure, not the engine: KNOWN_FAILURE is a failure here, and
# UNEXPECTED_PASS a pass.
_BADNESS: Mapping[Verdict, int] = dict.fromkeys(Verdict, 2) | {
    Verdict.PASSED: 0,
    Verdict.UNEXPECTED_PASS: 0,
    Verdict.UNSUPPORTED: 1,
}


def _refuse_unknown(engines: Sequence[str], known: Sequence[str]) -> None:
    for name in engines:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise UsageError(
                f"--engine {name!r}",
                expected=f"an engine of these runs ({', '.join(dict.fromkeys(known))})",
                got="none of that name",
                hint=f"--engine {near[0]}" if near else "leaving it out",
            )


def _by_key(records: Iterable[Record]) -> dict[RecordKey, Record]:
    found: dict[RecordKey, Record] = {}
    for record in records:
        # Of several records with one key, which the run lists as a problem, the worst counts.
        if record.key not in found or _badness(record) > _badness(found[record.key]):
            found[record.key] = record
    return found


def _change(before: Record | None, after: Record | None) -> RecordChange | None:
    record = after or before
    if record is None:
        return None
    traffic: tuple[TrafficChange, ...] = ()
    if before is not None and after is not None and is_measured(before) and is_measured(after):
        traffic = traffic_changes(before, after)
    news = _news(before, after, traffic)
    if not news:
        return None
    return RecordChange(
        engine=record.engine,
        case=record.case,
        world=record.world,
        news=news,
        before=before,
        after=after,
        traffic=traffic,
    )


def _news(
    before: Record | None, after: Record | None, traffic: tuple[TrafficChange, ...]
) -> tuple[News, ...]:
    if before is None:
        return (News.NEW,)
    if after is None:
        return (News.GONE,)
    communication = (News.COMMUNICATION,) if traffic else ()
    if before.verdict is not after.verdict or _excuse(before) != _excuse(after):
        return (_verdict_news(before, after), *communication)
    explanation = () if _is_explained_alike(before, after, bool(traffic)) else (News.EXPLANATION,)
    return (*explanation, *communication)


def _is_explained_alike(before: Record, after: Record, is_traffic_changed: bool) -> bool:
    if set(broken_laws(before)) != set(broken_laws(after)):
        return False
    was, now = steady(before.headline), steady(after.headline)
    if is_traffic_changed and before.verdict is Verdict.PASSED:
        was, now = (_COUNTED.sub("...", text) for text in (was, now))
    return was == now


def _verdict_news(before: Record, after: Record) -> News:
    was, now = _badness(before), _badness(after)
    # A pass is a pass, whatever the expectations are.
    is_alike = was[0] == now[0] and (was[0] == 0 or _fails_alike(before, after))
    if was == now or is_alike:
        return News.OTHER_VERDICT
    return News.WORSE if now > was else News.BETTER


def _badness(record: Record) -> tuple[int, bool]:
    return (_BADNESS[record.verdict], not record.verdict.is_conforming)


def _fails_alike(before: Record, after: Record) -> bool:
    """Whether both records show the same failure, which an expectation excuses in only one run."""
    was, now = set(broken_laws(before)), set(broken_laws(after))
    if was or now:
        return was == now
    # The harness prepends its note on an expectation to a headline.
    old, new = steady(before.headline), steady(after.headline)
    return old.endswith(new) or new.endswith(old)


def _excuse(record: Record) -> tuple[object, ...] | None:
    """What an expectation excuses, and why; the verdict shows where it applies and until when."""
    entry = record.expectation
    return None if entry is None else (entry.verdict, entry.reason, entry.link, entry.shows)


def _is_unmeasured(before: Record, after: Record) -> bool:
    return bool(before.ledger or after.ledger) and not (is_measured(before) and is_measured(after))


def _without(laws: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple(law for law in dict.fromkeys(laws) if law not in others)
