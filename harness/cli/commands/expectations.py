"""The command ``shardproof expectations``: update the file of known failures from a run, as a diff to review."""

from __future__ import annotations

import argparse
import difflib
from collections import Counter
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.cli.subcommand import Subcommand, add_engine_filter
from shardproof.harness.errors import UsageError
from shardproof.harness.records.provenance import today
from shardproof.harness.records.record import Expectations, Verdict
from shardproof.harness.records.run import Run, read_run, write_file
from shardproof.harness.verdicts import known_failures_file

if TYPE_CHECKING:
    from shardproof.harness.verdicts.known_failures_update import Outdated

_TERM = timedelta(days=90)  # a quarter: long enough for a fix to be released, short enough for a review
_ASKED = "?"  # a placeholder for a value that the caller must set


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--update", action="store_true", help="write the file; otherwise the change is printed"
    )
    parser.add_argument("--expectations", metavar="FILE", help="default: the file that the run was made with")
    for option, text in (
        ("reason", "one sentence on the new failures"),
        ("link", "address of their public report"),
        ("expiry", "last day of new entries; default: in 90 days"),
    ):
        parser.add_argument(f"--{option}", default="", metavar=option.upper(), help=text)
    add_engine_filter(parser, "new entries for these engines only, repeat for several")
    parser.add_argument("--case", default="*", metavar="GLOB", help="new entries for these cases only")


def _run(arguments: argparse.Namespace) -> int:
    """Bring the file of known failures in line with a run: print the change, and with --update write it.

    Entries that passed or are stale are removed or narrowed. Failures that no entry excuses get new entries, which need
    --reason and --link; choose the failures of one cause with --engine and --case. Returns 1 if something remains.
    """
    from shardproof.harness.cli.expectations_text import check_entries, new_table, without
    from shardproof.harness.verdicts.known_failures_update import judged_by, new_causes, outdated

    run = read_run(Path(arguments.run))
    if run.is_damaged:
        raise UsageError(
            f"run {arguments.run}", expected="whole files", got=run.problems[0], hint="running it again"
        )
    file = _file(arguments.expectations, run)
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    known = _known(file, run)
    records = judged_by(run, known)
    gone = list(outdated(records, run, known))
    causes = new_causes(records, engines=arguments.engine or (), case=arguments.case)
    fields = {"reason": arguments.reason or _ASKED, "link": arguments.link or _ASKED}
    expiry = _expiry(arguments.expiry)
    text = without(old, known, gone) + "".join(new_table(cause, **fields, expiry=expiry) for cause in causes)
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
    if causes and not (arguments.reason and arguments.link):
        print(f"nothing is written: {sum(len(c.cases) for c in causes)} failures need --reason and --link")
        return DOES_NOT_CONFORM
    check_entries(text, known, gone, causes)
    if text != old and not arguments.update:
        print("nothing is written without --update")
        return DOES_NOT_CONFORM
    if text != old:
        write_file(file, text)
        print(f"wrote {file}")
    return DOES_NOT_CONFORM if others else CONFORMS


def _is_treated(verdict: Verdict) -> bool:
    return verdict in known_failures_file.EXPECTABLE or verdict is Verdict.UNEXPECTED_PASS


def _file(named: str | None, run: Run) -> Path:
    if named is not None:
        return Path(named)
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


def _expiry(day: str) -> date:
    try:
        return date.fromisoformat(day) if day else today() + _TERM
    except ValueError as error:
        raise UsageError(
            "--expiry", expected="a day", got=repr(day), hint=f"--expiry {today() + _TERM}"
        ) from error


COMMAND = Subcommand(
    help="update the known failures from a run",
    place=7,
    add_arguments=_add_arguments,
    run=_run,
)
