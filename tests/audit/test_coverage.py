"""Every upstream test is a row; marks name its cases, and the verdicts of a run add up to the row's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import fsdp

from shardproof import UsageError, Verdict
from shardproof.harness.audit.upstream_coverage import (
    Coverage,
    Kind,
    Row,
    Table,
    check_patterns,
    cover,
    judge_row,
    read_table,
    read_tables,
)
from shardproof.harness.cli.main import main
from shardproof.harness.runner.invoke import call_pytest
from shardproof.reports.coverage_table import render, render_markdown
from tests.sample_records import a_record
from tests.shell import python

_OF_FSDP2 = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}
TESTS, FSDP1 = (read_tables()[name] for name in ("tests", "fsdp1"))
UPSTREAM, WRAPPER = TESTS.rows, FSDP1.rows
IDS = [row.id for row in UPSTREAM]


def a_row(id: str, *patterns: str, kind: Kind = Kind.OBSERVABLE, why: str = "", missing: str = "") -> Row:
    return Row(
        id=id, test="test_x +2", promise="it trains", kind=kind, why=why, missing=missing, patterns=patterns
    )


# The table


def test_the_table_has_every_upstream_test_once() -> None:
    assert len(set(IDS)) == len(IDS) == 419
    assert {
        f"{letter}{n:02}" for letter, last in (("T", 63), ("C", 35), ("R", 22)) for n in range(1, last + 1)
    } <= {*IDS}
    assert len({(row.file, row.test) for row in UPSTREAM}) == 419
    assert sum(row.num_tests for row in UPSTREAM) == 655
    assert all(len(row.promise) <= 160 and row.promise.isascii() for row in UPSTREAM)
    assert all(row.why for row in UPSTREAM if row.kind is not Kind.OBSERVABLE)


def test_the_interface_has_every_name_once() -> None:
    assert len({row.id for row in WRAPPER}) == len({row.promise for row in WRAPPER}) == len(WRAPPER) == 72
    assert all(len(row.promise) <= 100 and row.promise.isascii() for row in WRAPPER)
    assert {"init.module", "module", "clip_grad_norm_", "CustomPolicy"} <= {row.id for row in WRAPPER}


def test_every_public_name_of_fsdp1_has_a_row() -> None:
    # Public means exported: each name that a newer torch exports needs a row, or must be listed here.
    ids = {row.id.partition(".")[0] for row in WRAPPER}
    assert set(fsdp.__all__) - ids - _OF_FSDP2 == {"FullyShardedDataParallel"}
    arguments = set(inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters) - {"self", "module"}
    assert arguments <= ids


A_TABLE = """
mark = "rows"
column = "upstream test"
ids = "ids"
example = "rows(T01)"
command = "coverage"

[files."test_one.py"]
T01 = ["Class.test_x", "it trains"]

[files."test_two.py"]
T02 = ["test_y +3", "it replays", "gpu/test_a.py::test_*", "device: graphs are CUDA's"]
T03 = ["test_z", "it hurries", "parity/test_a.py", "reuse=twice,tied=unit", "open: by how much"]
"""


def test_a_table_is_read_in_the_order_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text(A_TABLE)
    table = read_table(file)
    assert (table.mark, table.column, table.ids) == ("rows", "upstream test", "ids")
    assert (table.example, table.command) == ("rows(T01)", "coverage")
    assert table.rows == [
        Row(id="T01", test="Class.test_x", promise="it trains", file="test_one.py"),
        Row(
            id="T02",
            test="test_y +3",
            promise="it replays",
            file="test_two.py",
            kind=Kind.DEVICE,
            why="graphs are CUDA's",
            patterns=("gpu/test_a.py::test_*",),
        ),
        Row(
            id="T03",
            test="test_z",
            promise="it hurries",
            file="test_two.py",
            missing="by how much",
            patterns=("parity/test_a.py", "reuse=twice,tied=unit"),
        ),
    ]


def test_the_table_needs_no_torch() -> None:
    code = (
        "import sys; from shardproof.harness.audit import upstream_coverage as found; found.read_tables(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert python("-c", code).returncode == 0


# Marks


def test_marks_add_up() -> None:
    marks = [pytest.mark.rows("T07", "R05"), pytest.mark.rows("R05", "T08")]
    assert TESTS.rows_of(marks, where="x") == ("T07", "R05", "T08")


@pytest.mark.parametrize(
    ("mark", "hint"),
    [
        (pytest.mark.rows("T7"), "got 'T7'; try 'T07'"),
        (pytest.mark.rows("T70"), "got 'T70'"),
        (pytest.mark.rows(), 'try @pytest.mark.rows("T07", "R05")'),
        (pytest.mark.rows.with_args(7), "got 7"),
        (pytest.mark.rows("qqq"), "try `shardproof coverage`"),
    ],
)
def test_a_mark_that_names_no_row_is_a_usage_error(mark: pytest.MarkDecorator, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        TESTS.rows_of([mark], where="x")
    assert hint in str(caught.value)


def test_names_of_an_interface_are_checked_alike() -> None:
    assert FSDP1.rows_of([pytest.mark.api("no_sync", "init.module")], where="x") == ("no_sync", "init.module")
    with pytest.raises(UsageError) as caught:
        FSDP1.rows_of([pytest.mark.api("clip_grad_norm")], where="x")
    assert "the api mark of x" in str(caught.value)
    assert "got 'clip_grad_norm'; try 'clip_grad_norm_'" in str(caught.value)


# Verdicts


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], None),
        (["PASSED", "PASSED"], "PASSED"),
        (["PASSED", "UNSUPPORTED"], "PASSED"),
        (["UNSUPPORTED", "UNSUPPORTED"], "UNSUPPORTED"),
        (["PASSED", "KNOWN_FAILURE", "UNSUPPORTED"], "KNOWN_FAILURE"),
        (["UNSUPPORTED", "KNOWN_FAILURE"], "KNOWN_FAILURE"),
        (["PASSED", "VACUOUS"], "VACUOUS"),
        (["KNOWN_FAILURE", "NOT_RUN", "ERRORED"], "ERRORED"),
        (["HUNG", "PASSED", "FAILED", "CRASHED"], "FAILED"),
    ],
)
def test_a_row_is_as_good_as_its_worst_case(verdicts: list[str], expected: str | None) -> None:
    assert judge_row([Verdict(v) for v in verdicts]) == expected


def test_every_verdict_has_its_place() -> None:
    assert {judge_row([verdict]) for verdict in Verdict} == set(Verdict)


CASES = {
    "parity/test_a.py::test_x[m1]": {"T01"},
    "parity/test_a.py::test_x[m3]": {"T01"},
    "parity/test_b.py::test_y": {"T01", "T02"},
    "parity/test_b.py::test_no_row": set[str](),
    "combinations/test_a.py::test_z[1]": {"reuse=twice", "tied=unit", "shapes=odd"},
    "combinations/test_a.py::test_z[2]": {"reuse=twice"},
}
ROWS = [
    a_row("T01"),
    a_row("T02", "combinations/test_a.py::test_z[2]"),
    a_row("T03", missing="no case"),
    a_row("T04", kind=Kind.DEVICE, why="graphs are CUDA's"),
    a_row("T05", "parity/test_a.py", missing="its speed"),
    a_row("T06", "reuse=twice,tied=unit"),
    a_row("T07", kind=Kind.INTERNAL, why="a kernel"),
    a_row("T08", kind=Kind.NEWER, why="since 2.15"),
    a_row("T09", "parity/test_a.py::test_x", kind=Kind.NEWER, why="since 2.15"),
]
RECORDS = [
    a_record(Verdict.PASSED, engine="mine", case="parity/test_a.py::test_x[m1]"),
    a_record(Verdict.PASSED, engine="mine", case="parity/test_b.py::test_y"),
    a_record(Verdict.FAILED, engine="mine", case="parity/test_b.py::test_y", world="threads:4"),
    a_record(Verdict.PASSED, engine="yours", case="parity/test_a.py::test_x[m1]"),
    a_record(Verdict.FAILED, engine="yours", case="elsewhere"),
]


def covered() -> Coverage:
    table = Table(
        mark="rows", rows=ROWS, column="upstream test", ids="ids", example="rows(T01)", command="coverage"
    )
    mutants = {"parity/test_a.py::test_x[m1]": {"A", "B"}, "parity/test_a.py::test_x[m3]": {"B", "C"}}
    return cover(table, CASES, RECORDS, mutants, {"parity/test_a.py::test_x[m3]": {"B", "D"}})


def test_joins_rows_cases_and_records() -> None:
    found = covered()
    assert found.engines == ("mine", "yours")
    assert [len(row.cases) for row in found.rows] == [3, 2, 0, 0, 2, 1, 0, 0, 2]
    assert [row.state.value for row in found.rows] == [
        *("covered", "covered", "open", "device", "in part", "covered", "internal", "newer", "covered")
    ]
    assert [(row.num_mutants, row.num_killed) for row in found.rows[:2]] == [(3, 1), (0, 0)]
    assert [[v.verdict for v in row.verdicts] for row in found.rows[:2]] == [
        ["FAILED", "PASSED"],
        ["FAILED", None],
    ]
    assert [v.num_judged for v in found.rows[0].verdicts] == [2, 1]
    assert [row.id for row in found.missing] == ["T03"]
    assert found.num_passed("yours") == 3


def test_a_pattern_of_no_case_is_a_usage_error() -> None:
    check_patterns(covered().table, CASES)
    for wrong in ("parity/test_a.py::test_w", "parity/test_c.py", "reuse=twice,tied=root", "test_x"):
        table = replace(covered().table, rows=[a_row("T01", wrong)])
        with pytest.raises(UsageError) as caught:
            check_patterns(table, CASES)
        assert f"row T01 of rows: expected patterns of cases, got {wrong!r}" in str(caught.value)


@pytest.mark.parametrize("rendered", [render, render_markdown])
def test_the_table_lists_rows_cases_and_totals(rendered: Callable[[Coverage], str]) -> None:
    text = rendered(covered())
    assert f"parity/a::x (2), {'and 1 more' if rendered is render else 'parity/b::y'}" in text
    assert "FAILED (2 of 3)" in text
    assert "PASSED (1 of 3)" in text
    assert {"- T04: graphs are CUDA's", "- T05: its speed", "- T07: a kernel"} <= {*text.splitlines()}
    assert "No case covers: T03" in text
    assert "PASSED by no engine here: T02 (FAILED), T03 (not run), T06 (not run)" in text
    assert text.endswith(
        "5 of 9 rows have cases; PASSED by mine: 2, yours: 3; "
        "3 of 6 rows that a CPU can show PASSED by one of these (50.0%), 1 need a GPU"
    )
    lines = {
        line.strip("| ").split()[0]: line.replace("|", " ").split()
        for line in text.splitlines()
        if re.match(r"\W*(T0\d|all) ", line)
    }
    assert lines["all"][1:] == ["27", "9", "4", "1", "1", "1", "1", "1", "2", "3"]
    assert [word for word in lines["T02"] if word == "-"] == ["-"]
    assert lines["T04"].count("GPU") == 2
    assert " ".join(lines["T01"]).count("3 1 of 3 ") == 1


# Sessions

TYPO = """
import pytest
from shardproof.harness.runner.trial import Trial

@pytest.mark.rows("T7")
def test_x(trial: Trial): ...
"""


@pytest.mark.slow
def test_a_wrong_mark_ends_a_session_and_the_command_names_rows_without_a_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_typo.py"
    file.write_text(TYPO)
    refused = call_pytest([str(file), "suites/smoke", "--collect-only"])
    assert refused == pytest.ExitCode.USAGE_ERROR
    assert "got 'T7'; try 'T07'" in capsys.readouterr().err
    codes = main(["coverage", "--markdown"]), main(["coverage", "--api", "fsdp1"])
    printed = capsys.readouterr().out
    assert re.search(r"^\| T07 .*trains_the_same_model", printed, re.M), printed
    (num,) = re.findall(r"^(\d+) of 419 rows have cases$", printed, re.M)
    (names,) = re.findall(r"^(\d+) of 72 rows have cases$", printed, re.M)
    heads, total = (re.findall(rf"^\| {row} +\|(.*)\|$", printed, re.M)[0] for row in ("file", "all"))
    counts = {
        head.strip(): int(count) for head, count in zip(heads.split("|"), total.split("|"), strict=True)
    }
    assert (counts["upstream tests"], counts["rows"]) == (655, 419)
    assert int(num) >= counts["covered"]
    assert not {"open", "in part"} & {*counts}, "a state that no row has is no column"
    assert printed.count("No case covers:") == (names != "72")
    assert codes == (0, names != "72")
