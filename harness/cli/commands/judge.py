"""The command ``shardproof judge``: judge a run's observations again, and write the result beside the run.

Only files are read: no world starts, and no engine is imported. pytest collects the cases that the records name.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.harness.cases.case_id import Node
from shardproof.harness.cli.exit_codes import PYTEST_ENDED
from shardproof.harness.cli.screen import show_run
from shardproof.harness.cli.subcommand import Subcommand, add_printed
from shardproof.harness.errors import HarnessBug, UsageError
from shardproof.harness.records.record import Footer, Record, RecordKey, Verdict
from shardproof.harness.records.run import JUDGED, Run, RunWriter, read_run
from shardproof.harness.runner.invoke import call_pytest, suite_folders
from shardproof.harness.worlds.spec import WorldSpec

if TYPE_CHECKING:  # importing pytest takes a while, and not every command needs it
    import pytest

_NO_CASE = "there is no such case"
_NOT_KEPT = "what passed or was refused is only kept by `run --keep all`"
_BROKE = "the test of the case ended without a verdict"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR", help="folder of the run")
    add_printed(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Judge again what a run observed, without a world or an engine; writes records and reports below DIR/judged.

    A record that cannot be judged again keeps its verdict and is listed; the exit code is then not 0.
    """
    return show_run(_judge_again(Path(arguments.run)), arguments)


def _judge_again(folder: Path) -> Path:
    """Judge every record whose observations can be read; returns the folder of the result, which is a run.

    The result has one record for each record of the run: the new one, or the old one if there is no new one. An earlier
    result is replaced. Raises UsageError if the folder contains no run.
    """
    old = read_run(folder)
    outcomes = _Outcomes()
    with tempfile.TemporaryDirectory() as scratch:
        new = _judged(old, folder, Path(scratch) / "run", outcomes)
    out = folder / JUDGED
    _remove(out)
    _write(out, old, new, outcomes)
    return out


class _Outcomes:
    """A pytest plugin that records which cases were collected, and why some were not judged."""

    def __init__(self) -> None:
        self._cases: set[RecordKey] = set()
        self._reasons: dict[RecordKey, str] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if (node := Node.parse(item.nodeid)) is not None:
            self._cases.add(node.key)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reason in a test's report."""
        from shardproof.harness.runner.record_writer import NOT_JUDGED_PROPERTY

        node = Node.parse(report.nodeid)
        for name, value in report.user_properties:
            if name == NOT_JUDGED_PROPERTY and node is not None:
                self._reasons[node.key] = str(value)

    def why_not(self, key: RecordKey) -> str:
        """Return why a case has no new record."""
        return self._reasons.get(key, _BROKE if key in self._cases else _NO_CASE)


def _judged(old: Run, folder: Path, scratch: Path, outcomes: _Outcomes) -> dict[RecordKey, Record]:
    known = {suite.name: suite for suite in suite_folders()}
    places = [known[suite] for suite in sorted({r.suite for r in old.records}) if suite in known]
    worlds = [world for world in dict.fromkeys(r.world for r in old.records) if _is_world(world)]
    if not places or not worlds:
        return {}
    code = call_pytest(
        [
            *map(str, places),
            *(f"--engine={engine}" for engine in dict.fromkeys(r.engine for r in old.records)),
            *(f"--world={world}" for world in worlds),
            f"--replay={folder}",
            f"--out={scratch}",
        ],
        outcomes,
    )
    if code not in PYTEST_ENDED:
        raise HarnessBug(
            f"judging {folder} again",
            expected="a verdict on each case",
            got=f"the end of pytest with exit code {code}",
            hint="the messages above",
        )
    records = read_run(scratch).records if scratch.exists() else ()
    return {r.key: r for r in records if r.verdict is not Verdict.NOT_RUN}


def _is_world(text: str) -> bool:
    try:
        WorldSpec.parse(text)
    except UsageError:
        return False
    return True


def _remove(out: Path) -> None:
    try:
        if out.exists():
            shutil.rmtree(out)
    except OSError as error:
        raise UsageError(
            f"replacing {out}",
            expected="the result of judging earlier",
            got=f"{type(error).__name__}: {error}",
            hint="removing it",
        ) from error


def _write(out: Path, old: Run, new: dict[RecordKey, Record], outcomes: _Outcomes) -> None:
    lost = [record for record in old.records if record.key not in new]
    reasons = [_NOT_KEPT if _is_not_kept(r) else outcomes.why_not(r.key) for r in lost]
    shortfalls = (*old.problems, *_listed([*zip(reasons, map(_name, lost), strict=True)]))
    records = [_with_place(new.get(record.key, record), record) for record in old.records]
    writer = RunWriter(out, replace(old.header, shortfalls=shortfalls))
    for record in records:
        writer.append(_seen_from_below(record))
    if old.footer is not None:
        writer.finish(_recounted(old.footer, records))


def _with_place(new: Record, old: Record) -> Record:
    """Keep where values first went wrong: finding it takes a training."""
    return replace(new, located=old.located) if new.verdict is Verdict.FAILED else new


def _is_not_kept(record: Record) -> bool:
    return not record.observation and record.verdict in {Verdict.PASSED, Verdict.UNSUPPORTED}


def _listed(lost: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield one line for each reason why cases were not judged again."""
    for reason, count in Counter(reason for reason, _ in lost).items():
        first = next(name for why, name in lost if why == reason)
        others = f", and {count - 1} more" if count > 1 else ""
        yield f"not judged again: {reason}: {first}{others}"


def _seen_from_below(record: Record) -> Record:
    """Make the path of the observations relative to the folder of the result."""
    return replace(record, observation=f"../{record.observation}") if record.observation else record


def _recounted(footer: Footer, records: Sequence[Record]) -> Footer:
    return replace(footer, counts=dict(Counter(str(record.verdict) for record in records)))


def _name(record: Record) -> str:
    return f"{record.engine} on {record.case} in {record.world}"


COMMAND = Subcommand(
    help="judge the observations of a run again", place=4, add_arguments=_add_arguments, run=_run
)
