"""Folds the changes of a comparison: a cause that changed many records is shown once. No markup here."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardproof.harness.records.diff.comparison import Comparison, News, RecordChange, steady
from shardproof.harness.records.diff.traffic import Traffic, TrafficChange
from shardproof.harness.records.record import Record, Verdict
from shardproof.reports.causes import shape
from shardproof.reports.text import ranks, size

TITLES: Mapping[News, str] = MappingProxyType(
    {
        News.WORSE: "Worse",
        News.BETTER: "Better",
        News.OTHER_VERDICT: "Another verdict or expectation",
        News.EXPLANATION: "Same verdict, another headline",
        News.COMMUNICATION: "Communication",
        News.NEW: "New in B",
        News.GONE: "Gone from A",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a group: the run it is from ("A", "B", or empty for both), and its text, not yet escaped."""

    side: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeGroup:
    """Records of one engine that changed alike; ``lines`` describe the change, of the first record if names differ."""

    news: News
    engine: str
    title: str
    lines: tuple[Line, ...]
    is_example: bool  # whether other records of the group have other names or numbers in their headlines
    changes: tuple[RecordChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """The common properties of the changes of one group."""

    news: News
    engine: str
    sign: Hashable


def groups(comparison: Comparison) -> tuple[ChangeGroup, ...]:
    """Fold changes by news and engine; the most urgent news first, then the largest group."""
    found: dict[_Key, list[RecordChange]] = {}
    for change in comparison.changes:
        for news in change.news:
            key = _Key(news=news, engine=change.engine, sign=_sign(news, change))
            found.setdefault(key, []).append(change)
    order = {news: place for place, news in enumerate(News)}
    folded = [_group(key, changes) for key, changes in found.items()]
    return tuple(sorted(folded, key=lambda group: (order[group.news], -len(group.changes))))


def case_lines(group: ChangeGroup) -> list[str]:
    """List the cases of a group, each once; with its worlds, unless all records of the group share one."""
    worlds: dict[str, list[str]] = {}
    for change in group.changes:
        worlds.setdefault(change.case, []).append(change.world)
    return list(worlds) if shared_world(group) else [f"{c} in {', '.join(w)}" for c, w in worlds.items()]


def shared_world(group: ChangeGroup) -> str:
    """Name the world of all records of a group; empty if there are several."""
    found = {change.world for change in group.changes}
    return found.pop() if len(found) == 1 else ""


def _group(key: _Key, changes: Sequence[RecordChange]) -> ChangeGroup:
    is_shown_by_first = key.news not in {News.COMMUNICATION, News.NEW, News.GONE}
    lines = _lines(key.news, changes)
    return ChangeGroup(
        news=key.news,
        engine=key.engine,
        title=_title(key.news, changes[0]),
        lines=lines,
        is_example=is_shown_by_first and any(_lines(key.news, [c]) != lines for c in changes[1:]),
        changes=tuple(changes),
    )


def _sign(news: News, change: RecordChange) -> Hashable:
    """Reduce a change to the part that it shares with others of the same cause."""
    if news is News.COMMUNICATION:
        return tuple(_kind(found) for found in change.traffic)
    title, lines = _title(news, change), _lines(news, [change])
    if news in {News.NEW, News.GONE}:
        return (title, change.world)
    return (title, tuple(Line(side=line.side, text=shape(line.text)) for line in lines))


def _title(news: News, change: RecordChange) -> str:
    record = change.after or change.before
    if record is None:
        return ""
    if news is News.COMMUNICATION:
        return ", ".join(dict.fromkeys(found.op for found in change.traffic))
    if news in {News.NEW, News.GONE}:
        return _verdict(record)
    if news is News.EXPLANATION or change.before is None:
        return _verdict(record)
    return f"{_verdict(change.before)} -> {_verdict(record)}"


def _verdict(record: Record) -> str:
    is_known = record.verdict is Verdict.KNOWN_FAILURE and record.expectation is not None
    seen = f" ({record.expectation.verdict})" if is_known and record.expectation is not None else ""
    return f"{record.verdict}{seen}"


def _lines(news: News, changes: Sequence[RecordChange]) -> tuple[Line, ...]:
    if news is News.COMMUNICATION:
        return tuple(_traffic_lines(changes))
    before, after = changes[0].before, changes[0].after
    if before is None or after is None:
        return ()
    if news is News.EXPLANATION:
        return tuple(_explanation(changes[0], before, after))
    return (*_reason("A", before), *_reason("B", after))


def _reason(side: str, record: Record) -> Iterable[Line]:
    """Explain a verdict; the headline of PASSED lists every law, and explains nothing."""
    if record.verdict is not Verdict.PASSED:
        yield Line(side=side, text=record.headline)
    if record.expectation is not None:
        yield Line(side=side, text=f"expectation: {record.expectation.reason} ({record.expectation.link})")


def _explanation(change: RecordChange, before: Record, after: Record) -> Iterable[Line]:
    """Show the parts of the headlines that differ: the headline of a pass has one for each law."""
    old, new = before.headline.split("; "), after.headline.split("; ")
    kept_old, kept_new = set(map(steady, old)), set(map(steady, new))
    if lost := "; ".join(part for part in old if steady(part) not in kept_new):
        yield Line(side="A", text=lost)
    if gained := "; ".join(part for part in new if steady(part) not in kept_old):
        yield Line(side="B", text=gained)
    if change.no_longer_broken:
        yield Line(side="", text=f"no longer broken: {', '.join(change.no_longer_broken)}")
    if change.newly_broken:
        yield Line(side="", text=f"newly broken: {', '.join(change.newly_broken)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrafficKind:
    """The change of one kind of collective, without amounts."""

    where: str  # ranks; empty if all
    phase: str
    op: str
    axis: str
    dtype: str
    how: str  # "new", "gone", or which of count and bytes grew or shrank


def _kind(found: TrafficChange) -> _TrafficKind:
    return _TrafficKind(
        where="" if found.is_everywhere else ranks(found.ranks),
        phase=found.phase,
        op=found.op,
        axis=found.axis,
        dtype=found.dtype,
        how=_how(found.before, found.after),
    )


def _how(before: Traffic, after: Traffic) -> str:
    if not before.count:
        return "new"
    if not after.count:
        return "gone"
    return f"{_trend(after.count - before.count)} {_trend(after.num_bytes - before.num_bytes)}"


def _trend(difference: int) -> str:
    return "more" if difference > 0 else "less" if difference < 0 else "same"


def _traffic_lines(changes: Sequence[RecordChange]) -> Iterable[Line]:
    """Show each kind of collective once, with the range of its numbers over all records of a group."""
    seen: dict[_TrafficKind, list[TrafficChange]] = {}
    for change in changes:
        for found in change.traffic:
            seen.setdefault(_kind(found), []).append(found)
    for kind, alike in seen.items():
        state = f"{kind.how}, " if kind.how in {"new", "gone"} else ""
        what = f"{kind.op} in {kind.phase} over {kind.axis}, {kind.dtype}"
        where = f" on {kind.where}" if kind.where else ""
        yield Line(side="", text=f"{what}{where}: {state}{_amounts(alike)}")


def _amounts(alike: Sequence[TrafficChange]) -> str:
    pairs = {(found.before, found.after) for found in alike}
    if len(pairs) > 1:
        counts = [after.count - before.count for before, after in pairs]
        sizes = [after.num_bytes - before.num_bytes for before, after in pairs]
        calls = f"{_range([f'{n:+}' for n in (min(counts), max(counts))])} calls"
        return f"{calls}, {_range([_signed(n) for n in (min(sizes), max(sizes))])}"
    ((before, after),) = pairs
    if not before.count or not after.count:
        only = after if after.count else before
        return f"{only.count} calls, {size(only.num_bytes)}"
    return f"{_arrow(str(before.count), str(after.count))} calls, {_sizes(before.num_bytes, after.num_bytes)}"


def _range(ends: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def _signed(num_bytes: int) -> str:
    return f"{'+' * (num_bytes >= 0)}{size(num_bytes)}"


def _sizes(before: int, after: int) -> str:
    if before != after and size(before) == size(after):  # alike only because both are rounded
        return f"{before} B -> {after} B"
    return _arrow(size(before), size(after))


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"
