"""A run prints each failure once in lines that fit, with colours and a bar only on a terminal, and JSON on demand."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.harness.cli.main import main
from shardproof.harness.cli.progress import CaseProgress
from shardproof.harness.cli.screen import styled
from shardproof.harness.records.record import LawRecord, Record, Verdict, to_json
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.record_writer import RECORD_PROPERTY
from shardproof.harness.worlds.output import drop_empty, printed
from shardproof.reports import terminal
from tests.pages import unpacked
from tests.sample_records import TRAINS
from tests.sample_runs import a_record, a_run

SUMS = "shardproof.engine.mutants.gradient_scale:SumsInsteadOfAveraging"
ESCAPE = "\x1b"


def _arguments(out: Path, *options: str) -> list[str]:
    judged = ["--engine", "torch.ddp", "--engine", SUMS, "--no-expectations", "--case", TRAINS]
    return ["run", *judged, "--out", str(out), *options]


def _on_a_terminal(*arguments: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardproof", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # how Linux reports that the other end is closed
        pass
    assert process.wait(timeout=110) == 1
    return shown.decode()


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_colours(tmp_path: Path) -> None:
    shown = _on_a_terminal(*_arguments(tmp_path / "run"))
    assert re.search(r"0/2.*left:", shown), "the bar shows the number of cases and the remaining time"
    assert f"{SUMS} in threads:2: smoke" in shown or "smoke/test_smoke" in shown, "the bar shows the case"
    assert f"{ESCAPE}[1;31mFAILED" in shown
    assert f"{ESCAPE}[32mPASSED" in shown
    assert shown.rstrip().splitlines()[-1].startswith("wrote "), "the bar must be gone"
    assert shown.rfind(f"{ESCAPE}[?25h") > shown.rfind(f"{ESCAPE}[?25l"), "and the cursor must be back"


@pytest.mark.slow
def test_a_file_gets_plain_lines_and_each_failure_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_arguments(tmp_path / "run")) == 1
    shown = capsys.readouterr().out
    assert ESCAPE not in shown
    (line,) = re.findall(r"^ *\d of 2 .*FAILED(?:.*\n {11})*.*$", shown, re.MULTILINE)
    assert "; 1 red" in line
    assert SUMS in line
    assert " ".join(shown.split()).count("exactly 2 x the reference") == 4, (
        "the headline, its place, two details"
    )
    assert shown.count("repeat: shardproof run") == 1


@pytest.mark.slow
def test_quiet_prints_only_failures_and_json_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_arguments(tmp_path / "quiet", "--quiet")) == 1
    quiet = capsys.readouterr().out
    assert quiet.startswith(f"FAILED {SUMS}")
    assert quiet.rstrip().splitlines()[-1].startswith("Not conforming: 1 of 2 declared passed")
    assert main(_arguments(tmp_path / "json", "--json")) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["conforms"] is False
    assert document["counts"] == {"PASSED": 1, "FAILED": 1}
    (cause,) = document["causes"]
    assert (cause["engine"], cause["cases"]) == (SUMS, [{"case": TRAINS, "world": "threads:2"}])
    assert all(Path(path).is_file() for path in document["reports"])


def test_rows_that_conform_alike_are_folded() -> None:
    passed = [a_record(f"parity/test_x.py::test_y[{i}]") for i in range(30)]
    run = a_run(*passed, a_record("parity/test_x.py::test_z", Verdict.FAILED))
    lines = terminal.render(run, is_verbose=True).splitlines()
    (folded,) = (line for line in lines if "30 cases" in line)
    assert folded.split() == ["30", "cases", "."]
    assert any(line.split() == ["x::z", "F"] for line in lines)
    assert not any("x::y" in line for line in lines)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_lines_fit_however_many_engines_there_are(width: int) -> None:
    details = tuple("a long detail of a law " * 10 for _ in range(9))
    broken = LawRecord(law="matches", held=False, summary="s " * 200, details=details)
    records = [
        a_record(case, Verdict.FAILED, engine=f"package.module_{n}:Engine", laws=(broken,), command="")
        for n in range(12)
        for case in ("parity/test_x.py::test_y", f"parity/test_x.py::test_{'long_' * 30}")
    ]
    run = a_run(*records)
    shown = terminal.render(run, width=width, is_verbose=True).splitlines()
    assert max(map(len, shown)) <= width
    rows = [line.split() for line in shown if "x::y" in line]
    cells = [cell for row in rows if row[0] == "x::y" for cell in row[1:]]
    assert cells == ["F"] * 12, "each column stands in one of the tables"


def test_a_run_opens_with_one_small_table() -> None:
    worlds = [f"threads:{n}" for n in range(1, 6)] + [f"processes:{n}" for n in (2, 3, 4)]
    verdicts = [Verdict.PASSED] * 75 + [Verdict.KNOWN_FAILURE, Verdict.UNSUPPORTED]
    records = [
        a_record(f"p/{n}", v, engine="torch.fsdp2", world=w) for w in worlds for n, v in enumerate(verdicts)
    ]
    run = a_run(
        *records, a_record("p/0", Verdict.UNSUPPORTED, engine="path/to/mine.py:Mine", world="threads:2")
    )
    kinds, sizes, fsdp2, mine, *_ = terminal.render(run, width=80).splitlines()
    assert sorted(kinds.split()) == ["processes", "threads"]
    assert sizes.split() == ["engine", "1", "2", "3", "4", "5", "2", "3", "4"]
    assert fsdp2.split() == ["torch.fsdp2", *["75", "1k"] * 8]
    assert mine.split() == ["path/to/mine.py:Mine", "-"]
    folded = terminal.render(run, width=60).splitlines()
    assert [folded[0].split(), folded[2].split()] == [
        ["threads", "processes"],
        ["torch.fsdp2", "375", "5k", "225", "3k"],
    ]


def test_failures_that_are_alike_are_written_once_and_a_broken_engine_is_told() -> None:
    class Screen:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def write_line(self, line: str) -> None:
            self.lines += line.splitlines()

    screen, progress = Screen(), CaseProgress()
    progress._terminal = screen
    for number in range(12):
        failed = a_record(
            f"parity/test_x.py::test_{number}", Verdict.CRASHED, headline=f"rank {number} raised"
        )
        report = pytest.TestReport(
            f"suites/parity/test_x.py::test_{number}[torch.ddp@threads:2]",
            ("", 0, ""),
            {},
            "failed",
            None,
            "call",
            user_properties=[(RECORD_PROPERTY, to_json(failed))],
        )
        progress.pytest_runtest_logreport(report)
    assert [line.split("; ")[0].split()[2:] for line in screen.lines if "CRASHED" in line] == [
        ["0", "CRASHED", "in", "0.0", "s"]
    ]
    assert "torch.ddp: the first 10 cases end alike; is it broken? Ctrl-C keeps them" in screen.lines


def test_colours_stand_on_verdicts_and_cells_alone() -> None:
    def coloured(record: Record) -> set[str]:
        text = styled(terminal.render(a_run(record), is_verbose=True))
        return {text.plain[span.start : span.end] for span in text.spans}

    assert coloured(a_record(headline="F E N")) == {"PASSED", ".", "Conforming"}
    assert {"FAILED", "F", "1F", "Not conforming"} <= coloured(
        a_record(verdict=Verdict.FAILED, headline="F E N")
    )


@pytest.mark.slow
def test_a_reader_that_ends_early_gets_no_traceback() -> None:
    listed = [sys.executable, "-m", "shardproof", "list", "--cases"]
    with subprocess.Popen(listed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=110) == 3


def test_closed_streams_are_not_taken_by_files_of_the_run(tmp_path: Path) -> None:
    """Python leaves the numbers of closed streams free, and the socket of the fork server took the first of them."""
    script = 'exec "$0" "$@" <&- >&-'
    words = [*_arguments(tmp_path / "run"), "--json"]
    command = ["sh", "-c", script, sys.executable, "-m", "shardproof", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "")


# The output of ranks is kept with the record and shown with a failure; the terminal shows only verdicts.


TALKATIVE = """
import os, sys, warnings
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine

class Talks(DistributedDataParallelEngine):
    def prepare(self, model, plan, mesh):
        print("from Python")
        warnings.warn("from a warning")
        os.write(2, b"from C: \\xff<b>\\n")
        return super().prepare(model, plan, mesh)

class TalksAndFails(Talks):
    def prepare(self, model, plan, mesh):
        super().prepare(model, plan, mesh)
        raise RuntimeError("enough")
"""
PRINTED = ("from Python", "from a warning", "from C: \\xff<b>")


@pytest.mark.parametrize("world", ["threads:2", "processes:2"])
def test_a_failure_shows_the_output_of_the_ranks(
    world: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talks.py").write_text(TALKATIVE)
    engines = [f"--engine={tmp_path / 'talks.py'}:{name}" for name in ("Talks", "TalksAndFails")]
    out = tmp_path / "run"
    options = ["--world", world, "--suite", "smoke", "-k", "trains", "--keep", "all"]
    assert main(["run", *engines, *options, "--out", str(out)]) == 1
    shown = capfd.readouterr()
    quiet, failed = read_run(out).records
    assert (quiet.verdict, quiet.output) == (Verdict.PASSED, "")
    assert failed.verdict is Verdict.CRASHED
    for words in PRINTED:
        assert words in failed.output
        assert words in shown.out.partition("printed:")[2], "with the failure"
        assert words not in shown.out.partition("printed:")[0]
        assert words not in shown.err
        assert words in printed(out / quiet.observation)
    assert "from C: \\xff&lt;b&gt;" in unpacked((out / "report.html").read_text())
    assert "Printed by the ranks:" in (out / "report.md").read_text()


def test_only_the_end_of_much_is_shown(tmp_path: Path) -> None:
    (tmp_path / "host0.output").write_text("first\n" + "x" * 100 + "last\n")
    (tmp_path / "host1.output").write_text("")
    assert printed(tmp_path, limit=10) == "host0 (the last 10 of 111 bytes):\nxxxxxlast"


def test_a_process_that_printed_nothing_leaves_no_file(tmp_path: Path) -> None:
    for name, text in (("a", ""), ("b", "word")):
        (tmp_path / name).write_text(text)
        drop_empty(tmp_path / name)
    drop_empty(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
