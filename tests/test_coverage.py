"""Every upstream test is a row; marks say which cases stand for it, and a run's verdicts add up to the row's."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import fsdp

from shardproof.harness.audit.upstream_coverage import (
    Coverage,
    Row,
    Table,
    cover,
    judge_row,
    read_table,
    read_tables,
)
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Verdict
from shardproof.reports.coverage_table import render, render_markdown
from tests.records import a_record

ROOT = Path(__file__).resolve().parents[1]
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


def a_row(id: str, why_gpu: str = "") -> Row:
    return Row(id=id, test="Class.test_x", promise="it trains", why_gpu=why_gpu)


# The table


def test_the_table_has_every_upstream_test_once() -> None:
    expected = [
        f"{letter}{n:02}" for letter, last in (("T", 39), ("C", 30), ("R", 17)) for n in range(1, last + 1)
    ]
    assert expected == IDS
    assert len({(row.file, row.test) for row in UPSTREAM}) == len({row.promise for row in UPSTREAM}) == 86
    assert all(re.fullmatch(r"\w+\.test_\w+", row.test) for row in UPSTREAM)
    assert all(len(row.promise) <= 100 and row.promise.isascii() for row in UPSTREAM)


def test_the_interface_has_every_name_once() -> None:
    assert len({row.id for row in WRAPPER}) == len({row.promise for row in WRAPPER}) == len(WRAPPER) == 72
    assert all(len(row.promise) <= 100 and row.promise.isascii() for row in WRAPPER)
    assert {"init.module", "module", "clip_grad_norm_", "CustomPolicy"} <= {row.id for row in WRAPPER}


def test_every_public_name_of_fsdp1_has_a_row() -> None:
    # Public means exported: what a newer torch exports must be given a row, or be named here.
    ids = {row.id.partition(".")[0] for row in WRAPPER}
    assert set(fsdp.__all__) - ids - _OF_FSDP2 == {"FullyShardedDataParallel"}
    arguments = set(inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters) - {"self", "module"}
    assert arguments <= ids


def test_rows_that_need_a_gpu_say_why() -> None:
    assert [row.id for row in UPSTREAM if row.why_gpu] == ["T39", "C05", "C23", "C25", "C26"]


A_TABLE = """
mark = "rows"
column = "upstream test"
ids = "ids"
example = "rows(T01)"
command = "coverage"

[files."test_one.py"]
T01 = ["Class.test_x", "it trains"]

[files."test_two.py"]
T02 = ["Class.test_y", "it replays", "graphs are CUDA's"]
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
            test="Class.test_y",
            promise="it replays",
            file="test_two.py",
            why_gpu="graphs are CUDA's",
        ),
    ]


def test_the_table_needs_no_torch() -> None:
    code = (
        "import sys; from shardproof.harness.audit import upstream_coverage as found; found.read_tables(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0


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
def test_what_is_no_row_is_a_usage_error(mark: pytest.MarkDecorator, hint: str) -> None:
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
}
ROWS = [a_row("T01"), a_row("T02"), a_row("T03"), a_row("T04", why_gpu="graphs are CUDA's")]
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
    return cover(table, CASES, RECORDS)


def test_joins_rows_cases_and_records() -> None:
    found = covered()
    assert found.engines == ("mine", "yours")
    assert [len(row.cases) for row in found.rows] == [3, 1, 0, 0]
    assert [[v.verdict for v in row.verdicts] for row in found.rows[:2]] == [
        ["FAILED", "PASSED"],
        ["FAILED", None],
    ]
    assert [v.num_judged for v in found.rows[0].verdicts] == [2, 1]
    assert [row.id for row in found.missing] == ["T03", "T04"]
    assert found.num_passed("yours") == 1


@pytest.mark.parametrize("rendered", [render, render_markdown])
def test_the_table_tells_it_all(rendered: Callable[[Coverage], str]) -> None:
    text = rendered(covered())
    assert f"parity/a::x (2), {'and 1 more' if rendered is render else 'parity/b::y'}" in text
    assert "FAILED (2 of 3)" in text
    assert "PASSED (1 of 3)" in text
    assert "- T04: graphs are CUDA's" in text
    assert "No case stands for: T03, T04" in text
    assert text.endswith("2 of 4 rows have cases; PASSED by mine: 0, yours: 1")
    lines = {
        line.strip("| ").split()[0]: line.split() for line in text.splitlines() if re.match(r"\W*T0\d ", line)
    }
    assert [word for word in lines["T02"] if word == "-"] == ["-"]
    assert lines["T04"].count("GPU") == 2


# Sessions

TYPO = """
import pytest
from shardproof.harness.runner.trial import Trial

@pytest.mark.rows("T7")
def test_x(trial: Trial): ...
"""
SESSIONS = """
import sys, pytest
from shardproof.harness.cli.main import main
from shardproof.harness.runner.invoke import call_pytest
refused = call_pytest([sys.argv[1], "suites/smoke", "--collect-only"])
print("codes", refused, main(["coverage", "--markdown"]), main(["coverage", "--api", "fsdp1"]))
"""


@pytest.mark.slow
def test_a_wrong_mark_ends_a_session_and_the_command_names_rows_without_a_case(tmp_path: Path) -> None:
    file = tmp_path / "test_typo.py"
    file.write_text(TYPO)
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert "got 'T7'; try 'T07'" in done.stderr
    assert re.search(r"^\| T07 .*trains_the_same_model", done.stdout, re.M), done.stdout + done.stderr
    (num,) = re.findall(r"^(\d+) of 86 rows have cases$", done.stdout, re.M)
    (names,) = re.findall(r"^(\d+) of 72 rows have cases$", done.stdout, re.M)
    assert done.stdout.count("No case stands for:") == (num != "86") + (names != "72")
    codes = (pytest.ExitCode.USAGE_ERROR, num != "86", names != "72")
    assert done.stdout.splitlines()[-1] == f"codes {' '.join(str(int(code)) for code in codes)}"
