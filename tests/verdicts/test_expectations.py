"""An expectation excuses only cases that it names, and fails if unused; a bad file is refused."""

from __future__ import annotations

import dataclasses
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.cases.case_id import SUITES, Catalogue, collected, files
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Expectation, Expectations, LawRecord, Record, Verdict
from shardproof.harness.verdicts.known_failures import (
    Fit,
    Ran,
    check_condition,
    containing,
    expected,
    fit,
    matches,
    named_defect,
    unused,
)
from shardproof.harness.verdicts.known_failures_file import SHIPPED, find, read
from tests.sample_records import CASE, ENTRY, a_record

TODAY = ENTRY.expiry


def an_entry(**changes: Any) -> Expectation:  # Any: the fields of Expectation
    return dataclasses.replace(ENTRY, **changes)


def known(*entries: Expectation) -> Expectations:
    return Expectations(source="known.toml", today=TODAY, entries=entries)


# A verdict, expected


def test_a_failure_that_shows_a_known_defect_names_it_and_stays_one() -> None:
    record = a_record(laws=(LawRecord(law="matches the oracle", held=False, summary="it moved"),))
    shown = named_defect(record, known(an_entry(shows=("matches the oracle: *moved",))))
    assert (shown.verdict, shown.expectation) == (record.verdict, None)
    assert (
        shown.headline
        == f"known defect of torch 2.13.0+cpu: {ENTRY.reason} ({ENTRY.link}); {record.headline}"
    )
    assert named_defect(record, known(an_entry(shows=("matches the oracle: *stayed",)))) == record
    assert named_defect(a_record(Verdict.PASSED), known(ENTRY)) == a_record(Verdict.PASSED)


def test_known_defects_are_those_of_cases_with_a_users_model() -> None:
    source = (SUITES / "user_model/test_user_model.py").read_text()
    cases = [f"user_model/test_user_model.py::{name}[Mine]" for name in re.findall(r"def (test_\w+)", source)]
    for entry in read(SUITES / "user_model/known_defects.toml", today=date(2026, 1, 1)).entries:
        assert any(matches(entry.case, case) for case in cases)


def test_a_known_failure_keeps_its_evidence() -> None:
    record = a_record()
    found = expected(record, known(ENTRY))
    assert found == dataclasses.replace(record, verdict=Verdict.KNOWN_FAILURE, expectation=ENTRY)
    assert found.headline == "what was seen"


def test_a_pass_against_an_expectation_is_reported_with_it() -> None:
    found = expected(a_record(Verdict.PASSED), known(ENTRY))
    assert (found.verdict, found.expectation) == (Verdict.UNEXPECTED_PASS, ENTRY)
    assert found.headline.startswith("expected to be FAILED, and passed")


def derived(verdict: Verdict = Verdict.FAILED, **changes: Any) -> Record:  # Any: the fields of Record
    mine = {"engine": "my.py:Mine", "engine_version": "mine 1.0", "known_as": "torch.fsdp2"}
    return a_record(verdict, **{**mine, "known_version": "torch 2.13.0+cpu", **changes})


def test_a_derived_engine_inherits_known_failures_and_names_their_engine() -> None:
    found = expected(derived(), known(ENTRY))
    assert (found.verdict, found.expectation) == (Verdict.KNOWN_FAILURE, ENTRY)
    assert found.headline == "torch.fsdp2 fails this case as well; what was seen"


def test_a_derived_engine_may_pass_cases_that_the_known_one_fails() -> None:
    assert expected(derived(Verdict.PASSED), known(ENTRY)).verdict is Verdict.PASSED


@pytest.mark.parametrize("changes", [{"known_as": ""}, {"known_version": "torch 2.16.0"}])
def test_only_a_release_that_fails_hands_its_failures_down(changes: dict[str, str]) -> None:
    assert expected(derived(Verdict.FAILED, **changes), known(ENTRY)).verdict is Verdict.FAILED


def test_a_case_that_contains_a_known_failure_may_fail_in_any_way() -> None:
    larger = a_record(Verdict.CRASHED, case="suites/larger")
    found = containing(larger, known(ENTRY), ["suites/other", CASE])
    assert (found.verdict, found.expectation) == (Verdict.KNOWN_FAILURE, ENTRY)
    assert found.headline == f"contains {CASE}; what was seen"
    assert containing(larger, known(ENTRY), ["suites/other"]) == larger
    assert containing(larger, known(an_entry(expiry="2030-06-14")), [CASE]) == larger
    assert containing(larger, known(an_entry(engine="another")), [CASE]) == larger
    passed = a_record(Verdict.PASSED, case="suites/larger")
    assert containing(passed, known(ENTRY), [CASE]) == passed


def test_an_expired_expectation_excuses_nothing() -> None:
    expired = an_entry(expiry="2030-06-14")
    found = expected(a_record(), known(expired))
    assert (found.verdict, found.expectation) == (Verdict.FAILED, expired)
    assert found.headline == "expectation expired on 2030-06-14; what was seen"
    passed = a_record(Verdict.PASSED)
    assert expected(passed, known(expired)) == passed, (
        "an expired expectation does not turn a pass into a failure"
    )


def test_an_expectation_excuses_only_the_verdict_that_it_states() -> None:
    found = expected(a_record(Verdict.CRASHED), known(ENTRY))
    assert found.verdict is Verdict.CRASHED
    assert found.headline == "expectation says FAILED, not CRASHED; what was seen"
    crashes = an_entry(number=2, verdict=Verdict.CRASHED, shows=("what was*",))
    crashed = a_record(Verdict.CRASHED, laws=())
    assert expected(crashed, known(ENTRY, crashes)).verdict is Verdict.KNOWN_FAILURE
    assert expected(a_record(), known(crashes, ENTRY)).expectation == ENTRY


HELD = LawRecord(law="agrees", held=True, summary="so it does")
BROKEN = LawRecord(law="agrees", held=False, summary="disagrees")
MATCHES = LawRecord(law="matches", held=False, summary="differs")


def test_an_expectation_excuses_only_the_laws_that_it_names() -> None:
    assert expected(a_record(laws=(MATCHES, HELD)), known(ENTRY)).verdict is Verdict.KNOWN_FAILURE
    for laws in ((MATCHES, BROKEN), (BROKEN,)):
        found = expected(a_record(laws=laws), known(ENTRY))
        assert (found.verdict, found.expectation) == (Verdict.FAILED, ENTRY)
        assert found.headline == "expectation excuses 'matches', not 'agrees'; what was seen"
    both = an_entry(shows=("agr*", "matches"))
    assert expected(a_record(laws=(MATCHES, BROKEN)), known(both)).verdict is Verdict.KNOWN_FAILURE
    assert expected(a_record(laws=(BROKEN,)), known(ENTRY, both)).expectation == both


def test_where_no_law_was_judged_the_headline_must_be_the_one_expected() -> None:
    crashes = an_entry(verdict=Verdict.CRASHED, shows=("rank ? raised*no identity",))
    crashed = a_record(Verdict.CRASHED, laws=(), headline="rank 1 raised RuntimeError:\nno identity")
    assert expected(crashed, known(crashes)).verdict is Verdict.KNOWN_FAILURE
    other = dataclasses.replace(crashed, headline="rank 1 raised RuntimeError: out of memory")
    found = expected(other, known(crashes))
    assert found.verdict is Verdict.CRASHED
    assert found.headline == (
        "expectation excuses 'rank ? raised*no identity', not 'rank 1 raised RuntimeError: out of memory'; "
        "rank 1 raised RuntimeError: out of memory"
    )


@pytest.mark.parametrize("verdict", sorted(set(Verdict) - {Verdict.FAILED, Verdict.PASSED}))
def test_no_other_verdict_is_changed(verdict: Verdict) -> None:
    assert expected(a_record(verdict), known(ENTRY)).verdict is verdict


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "torch.fsdp"},
        {"case": "parity/test_x.py::test_y"},
        {"case": "parity/test_x.py::test_y[*-SGD-*]"},
        {"case": "parity/test_x.py::test_y?mlp"},
        {"world": "threads:1"},
        {"world": "processes:*"},
        {"world": "!threads:2"},
        {"version": "torch <2.13"},
        {"version": "torchtitan >=2"},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_an_expectation_of_something_else_changes_nothing(changes: dict[str, str]) -> None:
    for record in (a_record(), a_record(Verdict.PASSED)):
        assert expected(record, known(an_entry(**changes))) == record


def test_no_expectations_change_nothing() -> None:
    assert expected(a_record(), None) == a_record()
    assert unused(None, Ran(catalogue=Catalogue(), worlds=(), records=())) == ()


def test_brackets_of_a_pattern_are_themselves() -> None:
    assert matches(CASE, CASE)
    assert matches("parity/*::test_y[mlp_????-*]", CASE)
    assert not matches("parity/test_x.py::test_[y]*", CASE)


@pytest.mark.parametrize(
    ("condition", "release", "found"),
    [
        ("", "anything at all", Fit.MEETS),
        ("torch >=2.11,<2.15", "torch 2.13.0+cpu", Fit.MEETS),
        ("torch ==2.13.0", "torch 2.13.0+cpu", Fit.MEETS),
        ("torch <=2.13", "torch 2.13.0+cu128", Fit.MEETS),
        ("torch >=2.13", "torch 2.14.0.dev20260101+cpu", Fit.MEETS),
        ("Torch>=2", "torch 2.13.0", Fit.MEETS),
        ("torch >2.13", "torch 2.13.0+cpu", Fit.MISSES),
        ("torch <2.13", "torch 2.13.0+cpu", Fit.MISSES),
        ("deepspeed >=0.1", "torch 2.13.0", Fit.NEVER),
        ("torch >=2", "torch from yesterday", Fit.NEVER),
        ("torch >=2", "2.13.0", Fit.NEVER),
        ("torch >=2", "", Fit.NEVER),
    ],
)
def test_a_condition_is_held_against_the_release(condition: str, release: str, found: Fit) -> None:
    assert fit(condition, release) is found


# Unused entries


def ran(*records: Record, is_whole: bool = True, cases: frozenset[str] = frozenset({CASE})) -> Ran:
    catalogue = Catalogue(cases=cases, is_whole=is_whole)
    return Ran(catalogue=catalogue, worlds=("threads:2",), records=records)


@pytest.mark.parametrize(
    ("changes", "verdict", "why", "is_stale"),
    [
        ({"case": "parity/test_gone*"}, Verdict.PASSED, "no case has such an id", True),
        ({"version": "deepspeed >=1"}, Verdict.FAILED, "calls itself 'torch 2.13.0+cpu'", True),
        ({}, Verdict.UNSUPPORTED, "refuses every such case", True),
        ({"version": "torch <2.13"}, Verdict.PASSED, "does not hold", False),
        ({"world": "processes:*"}, Verdict.PASSED, "no world of this run", False),
        ({"expiry": "2030-06-14"}, Verdict.FAILED, "expired on 2030-06-14", False),
        ({"expiry": "2030-06-14", "case": "gone"}, Verdict.FAILED, "expired on 2030-06-14", False),
    ],
    ids=["case", "name", "refused", "release", "world", "expired", "expired-case"],
)
def test_an_unused_entry_is_reported(
    changes: dict[str, str], verdict: Verdict, why: str, is_stale: bool
) -> None:
    entry = an_entry(**changes)
    (found,) = unused(known(entry), ran(a_record(verdict)))
    assert (found.expectation, found.is_stale) == (entry, is_stale)
    assert why in found.why


@pytest.mark.parametrize("changes", [{"case": "gone"}, {"version": "deepspeed >=1"}])
def test_a_selection_makes_no_entry_stale(changes: dict[str, str]) -> None:
    (found,) = unused(known(an_entry(**changes)), ran(a_record(), is_whole=False))
    assert not found.is_stale


@pytest.mark.parametrize("verdict", [Verdict.KNOWN_FAILURE, Verdict.UNEXPECTED_PASS, Verdict.CRASHED])
def test_a_used_entry_is_not_reported(verdict: Verdict) -> None:
    assert unused(known(ENTRY), ran(a_record(verdict))) == ()
    refused = a_record(Verdict.UNSUPPORTED, world="threads:4")
    assert unused(known(ENTRY), ran(refused, a_record(verdict))) == ()


def test_an_entry_of_an_engine_that_took_no_part_is_not_reported() -> None:
    assert unused(known(an_entry(case="gone")), ran(a_record(engine="torch.ddp"))) == ()


def test_a_case_that_makes_no_sense_in_these_worlds_is_not_stale() -> None:
    elsewhere = a_record(Verdict.PASSED, case="smoke/test_s.py::test_t")
    (found,) = unused(known(ENTRY), ran(elsewhere, cases=frozenset({CASE, elsewhere.case})))
    assert not found.is_stale
    assert "make no sense in these worlds" in found.why


def test_a_run_that_reached_nothing_makes_no_entry_stale() -> None:
    (found,) = unused(known(ENTRY), ran(a_record(Verdict.NOT_RUN, engine_version="")))
    assert not found.is_stale


def test_the_catalogue_is_whole_only_with_every_file_and_no_case_by_name() -> None:
    every = [f"suites/{file}::test_a[torch.ddp@threads:2-x]" for file in sorted(files())]
    assert len(every) > 5
    whole = collected([*every, "tests/test_b.py::test_b"], ["suites"])
    assert whole.is_whole
    assert "smoke/test_smoke.py::test_a[x]" in whole.cases
    assert not collected(every[1:], ["suites"]).is_whole
    assert not collected(every, ["suites/smoke", f"{every[0]}"]).is_whole
    assert not whole.narrowed().is_whole


# The file

GOOD = """
[[expectation]]
engine = "torch.fsdp2"
version = "torch >=2.11,<2.15"
case = "parity/test_x.py::test_y[*-sgd-*]"
shows = "matches"
reason = "Divides twice."
link = "https://example.org/issues/1"
expiry = 2030-06-15
"""


def _read(folder: Path, text: str) -> Expectations:
    file = folder / "known.toml"
    file.write_text(text)
    return read(file, today=date(2030, 6, 15))


def test_a_file_is_read(tmp_path: Path) -> None:
    text = f'{GOOD}{GOOD}world = "*:1"\nverdict = "HUNG"\n'.replace("torch.fsdp2", "my.py:Mine")
    mine = an_entry(engine="my.py:Mine")
    assert _read(tmp_path, text) == Expectations(
        source=str(tmp_path / "known.toml"),
        today=TODAY,
        entries=(mine, dataclasses.replace(mine, number=2, world="*:1", verdict=Verdict.HUNG)),
    )
    assert _read(tmp_path, "# none yet\n").entries == ()
    several = _read(tmp_path, GOOD.replace('"matches"', '["matches", "agr*"]'))
    assert several.entries == (an_entry(shows=("matches", "agr*")),)


def test_a_cause_lists_the_cases_that_show_it(tmp_path: Path) -> None:
    cases = """cases = [
    "parity/test_x.py::test_y[*-sgd-*]",
    { case = "smoke/*", engine = "torch.ddp", world = "*:1", verdict = "HUNG", shows = ["late", "never"] },
]"""
    text = GOOD.replace('case = "parity/test_x.py::test_y[*-sgd-*]"', cases)
    first = an_entry()
    other = an_entry(
        case="smoke/*", engine="torch.ddp", world="*:1", verdict=Verdict.HUNG, shows=("late", "never")
    )
    assert _read(tmp_path, text).entries == (first, other)
    assert [entry.number for entry in _read(tmp_path, text + GOOD).entries] == [1, 1, 2]


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ('case = "a"\ncases = ["b"]', ["expectation 1: cases", "got both"]),
        ("cases = []", ["expectation 1: cases", "got []"]),
        ('cases = "a"', ["expectation 1: cases", "got 'a'"]),
        ('cases = ["a", 3]', ["expectation 1: case 2", "got 3"]),
        ('cases = [{ world = "*:1" }]', ["expectation 1: case 1", "the id of a case"]),
        ('cases = [{ case = "a", reason = "b" }]', ["expectation 1: case 1", "'reason': 'b'"]),
        ('cases = ["a", { case = "b", world = "threads" }]', ["expectation 1, case 2: world", "'threads'"]),
    ],
)
def test_cases_that_cannot_be_right_are_refused(tmp_path: Path, cases: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        _read(tmp_path, GOOD.replace('case = "parity/test_x.py::test_y[*-sgd-*]"', cases))
    text = str(caught.value)
    assert all(word in text for word in ["known.toml", "; try ", *words]), text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("reason =", "raeson =", ["expectation 2", "'raeson'", "try 'reason'"]),
        ("reason =", "# reason =", ["expectation 2", "the key 'reason'"]),
        ("link =", "# link =", ["the key 'link'"]),
        ("shows =", "# shows =", ["the key 'shows'"]),
        ('"matches"', "[]", ["expectation 2: shows", "got []"]),
        ('"matches"', '["matches", ""]', ["expectation 2: shows", "''"]),
        ('"matches"', '["matches", 3]', ["expectation 2: shows", "3"]),
        ('"matches"', "3", ["expectation 2: shows", "got 3"]),
        ("expiry =", "# expiry =", ["the key 'expiry'"]),
        ("engine =", "# engine =", ["the key 'engine'"]),
        ("case =", "# case =", ["the key 'case'"]),
        ("torch.fsdp2", "torch.fdsp2", ["expectation 2: engine", "try 'torch.fsdp2'"]),
        ("parity/", "suites/parity/", ["expectation 2: case", "try 'parity/test_x.py"]),
        ("Divides twice.", "  ", ["expectation 2: reason", "'  '"]),
        ('"Divides twice."', "7", ["expectation 2: reason", "got 7"]),
        ("https://example.org/issues/1", "issue 1", ["expectation 2: link", "'issue 1'", "https://"]),
        ("https://example.org/issues/1", "javascript:alert(1)", ["expectation 2: link"]),
        ("2030-06-15", '"soon"', ["expectation 2: expiry", "'soon'", "expiry = 2027-01-31"]),
        ("2030-06-15", '"2030-06-15"', ["a date without quotes"]),
        ("2030-06-15", "2030-06-15T10:00:00", ["expectation 2: expiry", "2030-06-15 10:00:00"]),
        ("2030-06-15", "2030-06-31", ["TOML"]),
        (">=2.11,<2.15", ">=two", ["expectation 2: version", "torch >=2.11,<2.15"]),
        (" >=2.11,<2.15", "", ["expectation 2: version", "'torch'"]),
        ("torch >=2.11", ">=2.11", ["expectation 2: version"]),
        ("version =", 'world = "thread:*"\nversion =', ["expectation 2: world", "'thread:*'"]),
        ("version =", 'verdict = "PASSED"\nversion =', ["expectation 2: verdict", "FAILED, HUNG, CRASHED"]),
        ("[[expectation]]", "[[expectations]]", ["expectations", "[[expectation]]"]),
        ("[[expectation]]", "[[expectation]", ["TOML"]),
    ],
)
def test_a_bad_file_is_refused_with_the_entry_and_a_remedy(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        _read(tmp_path, GOOD + GOOD.replace(old, new))
    text = str(caught.value)
    assert all(word in text for word in ["known.toml", "; try ", *words]), text


def test_one_table_is_no_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two brackets"):
        _read(tmp_path, GOOD.replace("[[expectation]]", "[expectation]"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none there"):
        read(tmp_path / "nowhere.toml", today=date(2030, 6, 15))


@pytest.mark.parametrize(
    "condition", ["torch[x] >=2", "torch >=2; python_version > '3'", "torch @ https://x"]
)
def test_a_condition_has_a_name_and_bounds_and_no_more(condition: str) -> None:
    with pytest.raises(UsageError, match="bounds on its version"):
        check_condition(condition, "entry")


def test_the_file_that_ships_is_found_and_right() -> None:
    assert find(None) == SHIPPED == SUITES / "known_failures.toml"
    assert find("other.toml") == Path("other.toml")
    assert read(SHIPPED, today=date(2030, 6, 15)).source == str(SHIPPED)
