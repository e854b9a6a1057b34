"""The command ``shardproof merge``: one run from many with equal settings, such as the jobs of a matrix or shards."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardproof.harness.cli.screen import show_run
from shardproof.harness.cli.subcommand import Subcommand, add_printed
from shardproof.harness.errors import UsageError
from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.joining import carried, refuse_unlike
from shardproof.harness.records.record import Footer, Header, Record, RecordKey, UnusedExpectation
from shardproof.harness.records.run import Run, RunWriter, read_run, refuse_existing
from shardproof.harness.verdicts.known_failures import is_refused_throughout


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="DIR", nargs="+", help="folders of runs")
    parser.add_argument("--out", metavar="NEW", required=True, help="folder for the merged run")
    add_printed(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Merge runs with equal settings into one, and write its reports; returns the exit code of a single run of all.

    A run that is damaged or was interrupted, or a missing shard, makes the merged run incomplete.
    """
    out = Path(arguments.out)
    _merge([Path(folder) for folder in arguments.runs], out)
    return show_run(out, arguments)


def _merge(folders: Sequence[Path], out: Path) -> None:
    """Write one run with the records of all; an incomplete run or a missing shard makes it incomplete.

    Raises UsageError, before anything is written, for runs that do not belong together.
    """
    refuse_existing(out)
    _refuse_one_folder_twice(folders)
    runs = [ComparedRun(folder=str(folder), run=read_run(folder)) for folder in folders]
    for other in runs:
        refuse_unlike(runs[0], other)
    _refuse_two_releases(runs)
    kept = _kept(runs)
    writer = RunWriter(out, _header(runs, len(kept), out))
    records = []
    for record, place in kept.values():
        records.append(carried(record, folders[place], out, str(place + 1)))
        writer.append(records[-1])
    writer.finish(_footer(runs, records))


def _refuse_one_folder_twice(folders: Sequence[Path]) -> None:
    for folder, count in Counter(folder.resolve() for folder in folders).items():
        if count > 1:
            raise UsageError(
                "merge", expected="each run once", got=f"{count} times {folder}", hint="naming it once"
            )


def _refuse_two_releases(runs: Sequence[ComparedRun]) -> None:
    """Refuse two releases of one engine in worlds on the same kind of device."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for compared in runs:
        for record in compared.run.records:
            key = (record.engine, record.world.split(":", 2)[-1] if record.world.count(":") > 1 else "cpu")
            release, folder = seen.setdefault(key, (record.engine_version, compared.folder))
            if record.engine_version and not release:
                seen[key] = (record.engine_version, compared.folder)
            elif record.engine_version and record.engine_version != release:
                raise UsageError(
                    f"run {compared.folder}",
                    expected=f"{record.engine} as in {folder}, {release}",
                    got=record.engine_version,
                    hint="runs of one release of each engine",
                )


def _kept(runs: Sequence[ComparedRun]) -> dict[RecordKey, tuple[Record, int]]:
    """Return each record once, with the place of its run; a cell with two verdicts is refused."""
    kept: dict[RecordKey, tuple[Record, int]] = {}
    for place, compared in enumerate(runs):
        for record in compared.run.records:
            first, at = kept.setdefault(record.key, (record, place))
            if first.verdict is not record.verdict:
                raise UsageError(
                    f"{record.engine} on {record.case} in {record.world}",
                    expected=f"one verdict, {first.verdict} as in {runs[at].folder}",
                    got=f"{record.verdict} in {compared.folder}",
                    hint="leaving one of the two runs out",
                )
    return kept


def _header(runs: Sequence[ComparedRun], num_cases: int, out: Path) -> Header:
    headers = [compared.run.header for compared in runs]
    common = headers[0].options.items() & set.intersection(*(set(h.options.items()) for h in headers))
    days = [header.expectations.today for header in headers if header.expectations is not None]
    expectations = headers[0].expectations
    return replace(
        headers[0],
        started_at=min(header.started_at for header in headers),
        command=shlex.join(["shardproof", "merge", *(c.folder for c in runs), "--out", str(out)]),
        engines=tuple(dict.fromkeys(name for compared in runs for name in compared.engines)),
        worlds=tuple(dict.fromkeys(world for compared in runs for world in compared.worlds)),
        hardware=_hardware(headers),
        num_cases=num_cases,
        expectations=replace(expectations, today=max(days)) if expectations is not None else None,
        shortfalls=(*_shortfalls(runs), *_missing_shards(runs)),
        options={**dict(sorted(common)), "merged": str(len(runs))},
    )


def _hardware(headers: Sequence[Header]) -> dict[str, str]:
    names = dict.fromkeys(name for header in headers for name in header.hardware)
    return {
        name: "; ".join(dict.fromkeys(h.hardware[name] for h in headers if name in h.hardware))
        for name in names
    }


def _shortfalls(runs: Sequence[ComparedRun]) -> Iterator[str]:
    for compared in runs:
        if compared.run.is_interrupted:
            progress = f"{len(compared.run.records)} of {compared.run.header.num_cases} cases have a record"
            yield f"{compared.folder}: the run was interrupted: {progress}"
        yield from (f"{compared.folder}: {problem}" for problem in compared.run.problems)


def _missing_shards(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Report missing shards, and cases that no shard has; shards belong together if all other options are equal."""
    families: dict[tuple[object, ...], dict[int, Run]] = {}
    for run in (compared.run for compared in runs):
        number, _, of = run.header.options.get("shard", "").partition("/")
        if of:
            others = tuple(sorted(item for item in run.header.options.items() if item[0] != "shard"))
            family = families.setdefault((int(of), run.header.engines, run.header.worlds, others), {})
            family[int(number)] = run
    for (of_all, *_), family in families.items():
        if missing := [str(n) for n in range(1, int(str(of_all)) + 1) if n not in family]:
            plural, verb = ("s", "are") if len(missing) > 1 else ("", "is")
            yield f"shard{plural} {', '.join(missing)} of {of_all} {verb} missing"
            continue
        # Machines may collect different cases, such as those of an engine that one of them lacks.
        held = sum(len(run.records) for run in family.values())
        selected = {run.footer.num_selected for run in family.values() if run.footer is not None}
        if selected - {0, held}:
            yield f"the {of_all} shards hold {held} cases, and were cut from {', '.join(map(str, sorted(selected)))}"


def _footer(runs: Sequence[ComparedRun], records: Sequence[Record]) -> Footer:
    footers = [compared.run.footer for compared in runs if compared.run.footer is not None]
    return Footer(
        ended_at=max((footer.ended_at for footer in footers), default=runs[0].run.header.started_at),
        duration_s=sum(footer.duration_s for footer in footers),
        counts=dict(Counter(str(record.verdict) for record in records)),
        unused=tuple(_unused(runs, records)),
        unavailable={name: why for footer in footers for name, why in footer.unavailable.items()},
        is_whole=all(footer.is_whole for footer in footers),
        schema=runs[0].run.header.schema,
    )


def _unused(runs: Sequence[ComparedRun], records: Sequence[Record]) -> Iterator[UnusedExpectation]:
    """Yield the entries that applied to no record in any run of their engine; stale if they are stale in some run."""
    known = runs[0].run.header.expectations
    ends = [(compared.run.footer, compared) for compared in runs]
    for entry in known.entries if known is not None else ():
        concerned = [
            [unused for unused in footer.unused if unused.expectation == entry]
            for footer, compared in ends
            if footer is not None and entry.engine in {record.engine for record in compared.run.records}
        ]
        if not concerned or not all(concerned):
            continue
        entries = [found[0] for found in concerned]
        is_whole = all(footer is not None and footer.is_whole for footer, _ in ends)
        is_refused = is_whole and is_refused_throughout(entry, records)
        stale = [unused for unused in entries if unused.is_stale]
        yield replace((stale or entries)[0], is_stale=bool(stale) or is_refused)


COMMAND = Subcommand(help="make one run of many", place=6, add_arguments=_add_arguments, run=_run)
