"""`expectations --update` makes the file match a run, keeps comments, and excuses no failure without a reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from shardproof.harness.cases.case_id import Catalogue
from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Expectations, LawRecord, Record, Verdict
from shardproof.harness.records.run import RECORDS
from shardproof.harness.verdicts.known_failures import Ran, expected, unused
from shardproof.harness.verdicts.known_failures_file import read
from tests import sample_records

DAY = date(2030, 1, 1)
FILE = """# Known failures.

# The first cause, which has two cases.

[[expectation]]
engine = "torch.fsdp2"  # as given to --engine
shows = "matches*"
reason = "One."
link = "https://example.org/1"
expiry = 2040-05-31
cases = [
    "parity/a",  # everywhere
    { case = "parity/b", world = "*:3" },
]

# The second cause, a glob.

[[expectation]]
engine = "torch.fsdp2"
case = "smoke/*"
shows = "matches*"
reason = "Two."
link = "https://example.org/2"
expiry = 2040-05-31
"""


def a_record(
    case: str, verdict: Verdict, world: str = "threads:2", law: str = "matches the oracle"
) -> Record:
    laws = (LawRecord(law=law, held=verdict is not Verdict.FAILED, summary="s"),)
    has_laws = verdict in {Verdict.FAILED, Verdict.PASSED}
    suite, headline = case.partition("/")[0], f"{verdict} h"
    return sample_records.a_record(
        verdict, case=case, world=world, suite=suite, headline=headline, laws=laws if has_laws else ()
    )


class Desk:
    """A file of known failures, and a run that was judged by it."""

    def __init__(self, root: Path) -> None:
        self.file = root / "known.toml"
        self.run = root / "run"
        self.file.write_text(FILE)

    def judge(self, *raw: Record, is_raw: bool = False) -> tuple[Record, ...]:
        """Write a run of the whole catalogue with these records."""
        known = None if is_raw else self.known()
        judged = tuple(expected(record, known) for record in raw)
        worlds = tuple(dict.fromkeys(r.world for r in raw))
        header = replace(sample_records.HEADER, engines=("torch.fsdp2",), worlds=worlds, expectations=known)
        catalogue = Catalogue(cases=frozenset(r.case for r in raw), is_whole=True)
        found = unused(known, Ran(catalogue=catalogue, worlds=worlds, records=judged))
        sample_records.write_run(
            self.run, *judged, header=header, footer=replace(sample_records.FOOTER, unused=found)
        )
        return judged

    def known(self) -> Expectations:
        return read(self.file, today=DAY)

    def update(self, *more: str) -> int:
        return main(["expectations", "--update", str(self.run), "--expectations", str(self.file), *more])


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


FAIL, PASS = Verdict.FAILED, Verdict.PASSED
A, B = a_record("parity/a", FAIL), a_record("parity/b", FAIL, "threads:3")
S, T = a_record("smoke/s", FAIL), a_record("smoke/t", FAIL)
REASONED = ("--reason", "It is so.", "--link", "https://example.org/3")


def test_a_file_that_matches_the_run_stays_as_it_is(desk: Desk) -> None:
    desk.judge(A, B, S, T)
    assert desk.update() == 0
    assert desk.file.read_text() == FILE


def test_a_case_that_passed_is_removed_and_all_else_stays(desk: Desk) -> None:
    desk.judge(a_record("parity/a", PASS), B, S, T)
    assert desk.update() == 0
    assert desk.file.read_text() == FILE.replace('    "parity/a",  # everywhere\n', "")


def test_a_table_whose_cases_all_passed_is_removed_and_the_next_keeps_its_comment(desk: Desk) -> None:
    desk.judge(a_record("parity/a", PASS), a_record("parity/b", PASS, "threads:3"), S, T)
    assert desk.update() == 0
    text = desk.file.read_text()
    assert "Known failures" in text
    assert "# The second cause" in text
    assert [entry.case for entry in desk.known().entries] == ["smoke/*"]


def test_a_glob_of_which_some_cases_pass_is_narrowed(desk: Desk) -> None:
    elsewhere = replace(S, world="threads:3"), a_record("smoke/t", PASS, "threads:3")
    desk.judge(A, B, S, a_record("smoke/u", PASS), T, *elsewhere)
    assert desk.update() == 0
    entries = [(e.case, e.world, e.shows) for e in desk.known().entries[2:]]
    assert entries == [("smoke/s", "*", ("matches*",)), ("smoke/t", "threads:2", ("matches*",))]
    assert "# The second cause" in desk.file.read_text()


def test_an_entry_that_is_stale_is_removed(desk: Desk) -> None:
    desk.judge(A, B, a_record("parity/c", PASS))
    assert desk.update() == 0
    assert [entry.case for entry in desk.known().entries] == ["parity/a", "parity/b"]


def test_a_new_failure_needs_a_reason_and_a_link(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.judge(A, B, S, T, a_record("clipping/x", FAIL))
    for more in ((), REASONED[:2], REASONED[2:]):
        assert desk.update(*more) == 1
        assert desk.file.read_text() == FILE, "no failure is excused without a reason"
    printed = capsys.readouterr().out
    assert '+    {case = "clipping/x", world = "threads:2"},' in printed
    assert "--reason and --link" in printed


def test_a_new_entry_excuses_the_failures_of_the_run_and_no_more(desk: Desk) -> None:
    news = a_record("clipping/x", FAIL), a_record("clipping/y", FAIL, law="ranks agree")
    died = a_record("clipping/z", Verdict.CRASHED)
    desk.judge(A, B, S, T, *news, died)
    assert desk.update(*REASONED, "--expiry", "2031-01-01") == 0
    assert desk.file.read_text().startswith(FILE)
    known = desk.known()
    for record in (*news, died):
        assert expected(record, known).verdict is Verdict.KNOWN_FAILURE
    others = (
        a_record("clipping/x", FAIL, "threads:3"),
        a_record("clipping/x", FAIL, law="ranks agree"),
        replace(news[0], engine_version="torch 2.14.0"),
        replace(died, headline="another"),
        a_record("clipping/x", Verdict.CRASHED),
    )
    assert [expected(r, known).verdict for r in others] == [r.verdict for r in others]
    assert {e.expiry for e in known.entries[3:]} == {"2031-01-01"}


def test_a_failure_that_an_entry_does_not_excuse_gets_one_of_its_own(desk: Desk) -> None:
    crash = a_record("parity/a", Verdict.CRASHED)
    (noted, *_) = desk.judge(crash, B, S, T)
    assert noted.headline != crash.headline
    assert desk.update(*REASONED, "--expiry", "2031-01-01") == 0
    assert expected(crash, desk.known()).verdict is Verdict.KNOWN_FAILURE


def test_only_the_failures_asked_for_get_an_entry(desk: Desk) -> None:
    desk.judge(A, B, S, T, a_record("clipping/x", FAIL), a_record("clipping/y", FAIL))
    assert desk.update(*REASONED, "--case", "clipping/x") == 0
    assert [entry.case for entry in desk.known().entries[3:]] == ["clipping/x"]
    assert desk.update(*REASONED, "--engine", "torch.ddp") == 2, "the file has changed since the run"


def test_without_update_the_change_is_printed(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.judge(a_record("parity/a", PASS), B, S, T)
    assert main(["expectations", str(desk.run), "--expectations", str(desk.file)]) == 1
    assert desk.file.read_text() == FILE
    assert '-    "parity/a",  # everywhere' in capsys.readouterr().out


def test_a_file_that_changed_since_the_run_is_refused(desk: Desk) -> None:
    desk.judge(A, B, S, T)
    desk.file.write_text(FILE.replace("parity/a", "parity/c"))
    assert desk.update() == 2


def test_a_raw_run_writes_a_new_file(desk: Desk) -> None:
    desk.judge(A, S, is_raw=True)
    desk.file.unlink()
    assert desk.update(*REASONED) == 0
    assert [e.case for e in desk.known().entries] == ["parity/a", "smoke/s"]
    assert desk.update() == 0, "failures that the file excuses are not proposed again"


def test_a_damaged_run_changes_nothing(desk: Desk) -> None:
    desk.judge(a_record("parity/a", PASS), B, S, T)
    with (desk.run / RECORDS).open("a") as file:
        file.write("{}\n")
    assert desk.update() == 2
    assert desk.file.read_text() == FILE


@pytest.mark.parametrize("verdict", [Verdict.ERRORED, Verdict.VACUOUS, Verdict.NOT_RUN])
def test_a_verdict_not_of_the_engine_is_not_excused(desk: Desk, verdict: Verdict) -> None:
    desk.judge(A, B, S, T, a_record("clipping/x", verdict))
    assert desk.update(*REASONED) == 1
    assert desk.file.read_text() == FILE


def test_a_bad_link_is_refused(desk: Desk) -> None:
    desk.judge(A, B, S, T, a_record("clipping/x", FAIL))
    assert desk.update("--reason", "r", "--link", "example") == 2
    assert desk.file.read_text() == FILE
