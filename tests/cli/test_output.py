"""The output of ranks is kept with the record and shown with a failure; the terminal shows only verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.worlds.output import drop_empty, printed
from tests.pages import unpacked

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
