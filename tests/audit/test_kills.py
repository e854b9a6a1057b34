"""A case runs on the mutants that its marks name; a surviving mutant or a case without marks fails the run."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardproof import APART, FOUR_OR_MORE_EVEN, SEVERAL, Sizes, UsageError
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.harness.audit.kill_matrix import KillMatrix, MutantStatus, Target, kill_matrix
from shardproof.harness.audit.marks import (
    WORLDS,
    Breadth,
    Idle,
    MarkedCase,
    MustKill,
    Pair,
    Selection,
    check_names,
    deadline_of,
    kills_of,
    mutant_name,
    pairs,
    read_selection,
    write_selection,
)
from shardproof.harness.audit.shipped_mutants import shipped
from shardproof.harness.cli.commands.mutants import code_of_matrix
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM, OUR_FAULT
from shardproof.harness.records.record import Record, Verdict
from shardproof.reports.kills import render, render_json, render_markdown, summary
from tests import sample_records
from tests.shell import ROOT

CASE = "parity/test_x.py::test_y[m3]"
OTHER = "parity/test_x.py::test_z"


def a_case(*kills: MustKill, sizes: tuple[Sizes, ...] = ()) -> MarkedCase:
    return MarkedCase(id=CASE, kills=frozenset(kills), sizes=sizes)


def a_target(name: str = "Sums", *verdicts: str) -> Target:
    return Target(
        name=name, engine=f"m:{name}", fault="wrong", trace="NUMBERS", verdicts=verdicts or ("FAILED",)
    )


def a_pair(mutant: str = "Sums", **changes: Any) -> Pair:  # Any: the fields of Pair
    plain = Pair(mutant=mutant, case=CASE, world="threads:2", must_kill=True)
    return dataclasses.replace(plain, **changes)


def a_record(pair: Pair, verdict: Verdict) -> Record:
    return sample_records.a_record(verdict, engine=f"m:{pair.mutant}", case=pair.case, world=pair.world)


def a_matrix(
    *records: Record, pairs: tuple[Pair, ...] = (a_pair(),), is_whole: bool = True, **selected: Any
) -> KillMatrix:
    targets = tuple({p.mutant: a_target(p.mutant) for p in pairs}.values())
    return kill_matrix(targets, Selection(pairs=pairs, **selected), records, is_whole=is_whole)


# Marks


def test_marks_add_up() -> None:
    marks = [
        pytest.mark.kills("A", "B"),
        pytest.mark.kills("B", "C", world="threads:4"),
        pytest.mark.kills("D", deadline_s=10),
    ]
    kills = kills_of(marks, where=CASE)
    assert kills == {
        *(MustKill(mutant=name) for name in "AB"),
        *(MustKill(mutant=name, world="threads:4") for name in "BC"),
        MustKill(mutant="D", deadline_s=10),
    }
    assert [deadline_of(name, kills, 60.0) for name in "AD"] == [60.0, 10]
    assert deadline_of("D", kills, 5.0) == 5.0


@pytest.mark.parametrize(
    ("args", "kwargs", "hint"),
    [
        ((), {}, "kills()"),
        ((1,), {}, "kills(1)"),
        (("A",), {"worlds": "threads:4"}, "worlds='threads:4'"),
        (("A",), {"world": "thread:4"}, "try --world threads:4"),
        (("A",), {"deadline_s": "10"}, "kills('A', deadline_s='10')"),
    ],
)
def test_a_mark_that_cannot_be_read_is_a_usage_error(
    args: tuple[Any, ...], kwargs: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        kills_of([pytest.mark.kills.with_args(*args, **kwargs)], where=CASE)
    assert hint in str(caught.value)


def test_an_unknown_mutant_is_a_usage_error_with_a_near_name() -> None:
    known = [m.name for m in MUTANTS]
    check_names([a_case(MustKill(mutant="SumsInsteadOfAveraging"))], known)
    with pytest.raises(UsageError, match=r"got 'SumsInstedOfAveraging'; try 'SumsInsteadOfAveraging'"):
        check_names([a_case(MustKill(mutant="SumsInstedOfAveraging"))], known)
    with pytest.raises(UsageError, match=r"of X: .* got 'Qqq', 'Zzz'; try names from engine/mutants"):
        check_names([MarkedCase(id="X", kills=frozenset(MustKill(mutant=n) for n in ("Zzz", "Qqq")))], known)


def test_marks_accept_the_name_of_a_mutant_in_the_catalogue() -> None:
    assert [mutant_name(m.engine_spec) for m in MUTANTS] == [m.name for m in MUTANTS]
    assert [mutant_name(e) for e in ("a/b.py:Mine", "torch.ddp")] == ["Mine", "torch.ddp"]


# Pairs


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ((), "threads:2"),
        ((SEVERAL,), "threads:2"),
        ((SEVERAL, FOUR_OR_MORE_EVEN), "threads:4"),
        ((APART,), "processes:2"),
    ],
)
def test_a_pair_runs_in_the_first_world_that_suits_the_case(sizes: tuple[Sizes, ...], world: str) -> None:
    found = pairs(a_case(MustKill(mutant="A"), sizes=sizes), ["A", "B"], WORLDS, Breadth.MARKED)
    assert found == (a_pair("A", world=world),)


def test_a_mark_may_name_a_world_outside_the_list() -> None:
    case = a_case(MustKill(mutant="A"), MustKill(mutant="A", world="threads:6"), MustKill(mutant="B"))
    assert pairs(case, ["A", "B"], ["threads:2"], Breadth.MARKED) == (
        a_pair("A", world="threads:6"),
        a_pair("B"),
    )


def test_a_mark_may_not_name_a_world_that_does_not_suit_the_case() -> None:
    case = a_case(MustKill(mutant="A", world="threads:1"), sizes=(SEVERAL,))
    with pytest.raises(UsageError, match="two ranks or more"):
        pairs(case, ["A"], WORLDS, Breadth.MARKED)


def test_full_breadth_adds_mutants_that_no_mark_names() -> None:
    found = pairs(a_case(MustKill(mutant="A")), ["A", "B"], WORLDS, Breadth.ALL)
    assert found == (a_pair("A"), a_pair("B", must_kill=False))


def test_a_case_that_no_world_suits_makes_no_pair() -> None:
    assert pairs(a_case(MustKill(mutant="A"), sizes=(SEVERAL,)), ["A"], ["threads:1"], Breadth.ALL) == ()


def test_a_selection_can_be_read_back(tmp_path: Path) -> None:
    selection = Selection(pairs=(a_pair(),), elsewhere=(a_pair("B"),), idle=(Idle(case=OTHER, why="x"),))
    write_selection(tmp_path / "new", selection)
    assert read_selection(tmp_path / "new") == selection
    assert read_selection(tmp_path) is None


# Kills


def test_each_mutant_dies_of_verdicts_that_are_known() -> None:
    targets = {target.name: target for target in shipped()}
    assert len(targets) == len(MUTANTS)
    assert all(target.verdicts for target in targets.values())
    assert targets["AcceptsEveryPlan"].verdicts == ("UNSUPPORTED_SILENT",)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_its_own_verdict_kills_a_mutant(verdict: Verdict) -> None:
    (result,) = a_matrix(a_record(a_pair(), verdict)).results
    statuses = {
        Verdict.ERRORED: MutantStatus.UNKNOWN,
        Verdict.NOT_RUN: MutantStatus.UNKNOWN,
        Verdict.FAILED: MutantStatus.KILLED,
        Verdict.UNSUPPORTED: MutantStatus.REFUSED,
    }
    assert result.status is statuses.get(verdict, MutantStatus.SURVIVED)


def test_a_run_in_which_all_are_killed_is_proven() -> None:
    matrix = a_matrix(a_record(a_pair(), Verdict.FAILED))
    assert matrix.is_proven
    assert code_of_matrix(matrix) == CONFORMS
    assert summary(matrix, duration_s=182).startswith(
        "1 of 1 mutants killed, 1 of 1 cases kill at least one; 1"
    )


def test_a_mutant_that_survives_one_case_fails_though_another_kills_it() -> None:
    both = (a_pair(), a_pair(case=OTHER))
    matrix = a_matrix(a_record(both[0], Verdict.FAILED), a_record(both[1], Verdict.PASSED), pairs=both)
    assert [result.pair for result in matrix.survivors] == [both[1]]
    assert matrix.unkilled == ()
    assert [idle.case for idle in matrix.harmless] == [OTHER]
    assert code_of_matrix(matrix) == DOES_NOT_CONFORM


def test_a_mutant_that_refuses_one_case_must_die_of_others() -> None:
    both = (a_pair(), a_pair(case=OTHER), a_pair("B", case=OTHER))
    died = [a_record(both[0], Verdict.FAILED), a_record(both[2], Verdict.FAILED)]
    refused = a_record(both[1], Verdict.UNSUPPORTED)
    matrix = a_matrix(*died, refused, pairs=both)
    assert [result.pair for result in matrix.refused] == [both[1]]
    assert code_of_matrix(matrix) == CONFORMS
    assert "1 pairs refused" in summary(matrix, duration_s=1)
    assert f"{both[1].mutant} in threads:2 on {OTHER}: UNSUPPORTED" in render_markdown(matrix)
    survived = a_matrix(a_record(both[0], Verdict.PASSED), *died[1:], refused, pairs=both)
    assert [target.name for target in survived.unkilled] == [both[0].mutant]


def test_mutants_and_cases_with_only_refused_pairs_do_not_count() -> None:
    matrix = a_matrix(a_record(a_pair(), Verdict.UNSUPPORTED))
    assert (matrix.unkilled, matrix.harmless) == ((), ())
    assert code_of_matrix(matrix) == CONFORMS
    assert "1 pairs refused" in summary(matrix, duration_s=1)


def test_a_mutant_that_is_not_named_may_survive() -> None:
    both = (a_pair(), a_pair(case=OTHER), a_pair("B"), a_pair("B", case=OTHER, must_kill=False))
    died = [a_record(pair, Verdict.FAILED) for pair in both[:3]]
    matrix = a_matrix(*died, a_record(both[3], Verdict.PASSED), pairs=both)
    assert code_of_matrix(matrix) == CONFORMS


def test_a_mutant_without_a_pair_counts_only_in_a_whole_run() -> None:
    selection, records = Selection(pairs=(a_pair(),)), [a_record(a_pair(), Verdict.FAILED)]
    targets = [a_target(), a_target("B")]
    whole = kill_matrix(targets, selection, records, is_whole=True)
    assert [target.name for target in whole.unkilled] == ["B"]
    assert code_of_matrix(whole) == DOES_NOT_CONFORM
    assert code_of_matrix(kill_matrix(targets, selection, records, is_whole=False)) == CONFORMS


def test_a_mutant_that_no_mark_names_may_survive_only_a_partial_run() -> None:
    both = (a_pair(), a_pair("B", must_kill=False))
    records = [a_record(both[0], Verdict.FAILED), a_record(both[1], Verdict.PASSED)]
    assert code_of_matrix(a_matrix(*records, pairs=both, is_whole=False)) == CONFORMS
    assert code_of_matrix(a_matrix(*records, pairs=both, is_whole=True)) == DOES_NOT_CONFORM


def test_a_case_without_mutants_fails() -> None:
    matrix = a_matrix(a_record(a_pair(), Verdict.FAILED), idle=(Idle(case=OTHER, why="no kills mark"),))
    assert matrix.harmless == (Idle(case=OTHER, why="no kills mark"),)
    assert code_of_matrix(matrix) == DOES_NOT_CONFORM


def test_a_pair_that_needs_another_machine_is_listed_and_fails_no_mutant() -> None:
    away = a_pair("B", case=OTHER, world="processes:2:cuda")
    selection = Selection(pairs=(a_pair(),), elsewhere=(away,))
    targets = [a_target(), a_target("B")]
    matrix = kill_matrix(targets, selection, [a_record(a_pair(), Verdict.FAILED)], is_whole=True)
    assert code_of_matrix(matrix) == CONFORMS
    assert "processes:2:cuda" in render_markdown(matrix)


@pytest.mark.parametrize(
    "records", [(), (a_record(a_pair(), Verdict.ERRORED),), (a_record(a_pair(), Verdict.NOT_RUN),)]
)
def test_a_pair_without_a_verdict_is_our_fault(records: tuple[Record, ...]) -> None:
    matrix = a_matrix(*records)
    assert len(matrix.unknown) == 1
    assert matrix.survivors == ()
    assert code_of_matrix(matrix) == OUR_FAULT


def test_every_format_lists_survivors_and_their_cases() -> None:
    both = (a_pair(), a_pair("B", case=OTHER))
    matrix = a_matrix(a_record(both[0], Verdict.FAILED), a_record(both[1], Verdict.CRASHED), pairs=both)
    for text in (render(matrix, duration_s=1.5), render_markdown(matrix)):
        assert f"B in threads:2 on {OTHER}: CRASHED: what was seen" in text
        assert "parity/x::y" in text
        assert "1 of 2 mutants killed, 1 of 2 cases kill at least one, 1 pairs survived" in text
    plain = json.loads(render_json(matrix))
    assert [mutant["killed_by"] for mutant in plain["mutants"]] == [[CASE], []]
    assert [pair["fate"] for pair in plain["pairs"]] == ["killed", "survived"]
    assert {case["case"]: case["kills"] for case in plain["cases"]} == {CASE: ["Sums"], OTHER: []}


def test_marks_on_the_page_name_existing_mutants() -> None:
    page = (ROOT / "docs" / "write-a-case.md").read_text()
    shown = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"mark\.kills\(.*\)", page))))
    assert shown
    assert shown <= {mutant.name for mutant in MUTANTS}
    assert {"rows", "kills"} <= set(re.findall(r"^\| `(\w+)\(", page, re.M))
