"""The settings of two runs: which differ, and which make their records hard to compare. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.harness.records.record import Expectation, Header
from shardproof.harness.records.run import Run

_ABSENT = "none"
# Memory and core counts vary between machines of one kind, and no verdict depends on them.
_HARDWARE = ("cpu", "gpus", "platform")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run, and the folder that it was read from, as the caller spelt it."""

    folder: str
    run: Run

    @property
    def engines(self) -> tuple[str, ...]:
        """The requested engines, then those that only records have."""
        recorded = (record.engine for record in self.run.records)
        return tuple(dict.fromkeys((*self.run.header.engines, *recorded)))

    @property
    def worlds(self) -> tuple[str, ...]:
        """The requested worlds, then those that only records have."""
        recorded = (record.world for record in self.run.records)
        return tuple(dict.fromkeys((*self.run.header.worlds, *recorded)))

    def of(self, engines: Sequence[str]) -> ComparedRun:
        """Keep the records of these engines; all if there are none."""
        if not engines:
            return self
        kept = tuple(record for record in self.run.records if record.engine in engines)
        header = replace(
            self.run.header, engines=tuple(name for name in self.run.header.engines if name in engines)
        )
        return replace(self, run=replace(self.run, header=header, records=kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the runs that differs; ``none`` is the text for its absence."""

    name: str
    before: str
    after: str


def settings_that_differ(before: ComparedRun, after: ComparedRun) -> tuple[Setting, ...]:
    """List versions, engines, worlds and options that differ; none of these is a change of a record."""
    old, new = _settings(before.run.header), _settings(after.run.header)
    return (
        *_different(before.run.header.versions, after.run.header.versions),
        *_engine_versions(before, after),
        *_different(
            {"engines": ", ".join(before.engines), "worlds": ", ".join(before.worlds)},
            {"engines": ", ".join(after.engines), "worlds": ", ".join(after.worlds)},
        ),
        *_different(old, new),
    )


def warnings(before: ComparedRun, after: ComparedRun) -> tuple[str, ...]:
    """List the reasons why the runs cannot be compared."""
    return (
        *_unshared("engines", before.engines, after.engines),
        *_unshared("worlds", before.worlds, after.worlds),
        *_other_options(before.run.header, after.run.header),
        *_other_expectations(before.run.header, after.run.header),
        *_incomplete("A", before.run),
        *_incomplete("B", after.run),
    )


def _settings(header: Header) -> dict[str, str]:
    expectations = header.expectations
    return {
        "schedule seed": str(header.seed),
        "schedules": str(header.num_schedules),
        "thorough": "yes" if header.is_thorough else "no",
        "known failures": str(len(expectations.entries)) if expectations is not None else _ABSENT,
        **{name: header.hardware.get(name, _ABSENT) for name in _HARDWARE},
        "git": header.git_head[:12] + (" with changed files" if header.git_dirty else ""),
    }


def _different(old: Mapping[str, str], new: Mapping[str, str]) -> Iterable[Setting]:
    for name in dict.fromkeys((*old, *new)):
        was, now = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if was != now:
            yield Setting(name=name, before=was, after=now)


def _engine_versions(before: ComparedRun, after: ComparedRun) -> Iterable[Setting]:
    """Compare the versions of engines in both runs; engines with the same change share a line."""
    old, new = _versions_by_engine(before.run), _versions_by_engine(after.run)
    changed: dict[tuple[str, str], list[str]] = {}
    for engine in old:
        if engine in new and old[engine] != new[engine]:
            changed.setdefault((old[engine], new[engine]), []).append(engine)
    for (was, now), engines in changed.items():
        yield Setting(name=", ".join(engines), before=was, after=now)


def _versions_by_engine(run: Run) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for record in run.records:
        # Empty if no case of the engine came to a verdict.
        if record.engine_version:
            found.setdefault(record.engine, {})[record.engine_version] = None
    return {engine: " and ".join(sorted(versions)) for engine, versions in found.items()}


def _unshared(what: str, old: Sequence[str], new: Sequence[str]) -> Iterable[str]:
    for side, own, others in (("A", old, new), ("B", new, old)):
        if only := [name for name in own if name not in others]:
            yield f"{what} in {side} only: {', '.join(only)}; their records show as new or gone"


def _other_options(old: Header, new: Header) -> Iterable[str]:
    if old.seed != new.seed:
        yield f"schedule seeds differ ({old.seed}, {new.seed}): the ranks ran in other orders"
    if old.num_schedules != new.num_schedules:
        yield f"numbers of schedules differ ({old.num_schedules}, {new.num_schedules}): one run tried more orders"
    if old.is_thorough != new.is_thorough:
        watched = "A" if old.is_thorough else "B"
        yield f"only {watched} was made with --thorough: the other did not watch for races and lifetimes"


def _other_expectations(old: Header, new: Header) -> Iterable[str]:
    was, now = (
        None if h.expectations is None else tuple(map(_essence, h.expectations.entries)) for h in (old, new)
    )
    if was is not None and now is not None:
        num_old, num_new = len(set(was) - set(now)), len(set(now) - set(was))
        if num_old or num_new:
            yield f"known failures differ: {num_old} entries in A only, {num_new} in B only"
    elif was is not now:
        raw = "A" if was is None else "B"
        yield f"{raw} was made without known failures, so its verdicts are raw"


def _essence(entry: Expectation) -> Expectation:
    return replace(entry, number=0)  # its place in the file


def _incomplete(side: str, run: Run) -> Iterable[str]:
    if run.is_interrupted:
        yield f"{side} was interrupted: records missing there may only not have been reached"
    yield from (f"{side}: {problem}" for problem in run.problems)
