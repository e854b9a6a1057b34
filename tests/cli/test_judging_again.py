"""Judging a run again reads files, starts no engine, and writes its result beside the run without changing it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardproof.harness.cli.main import main
from shardproof.harness.records.manifest import MANIFEST
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import JUDGED, RECORDS, RUN, Run, read_run
from tests.sample_records import write_run

ENGINE = """
from pathlib import Path

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine

with Path(__file__).with_name("imports").open("a") as imports:
    imports.write("x")


class Counted(DistributedDataParallelEngine):
    capabilities = DistributedDataParallelEngine.capabilities

    def version(self):
        return "counted 1"
"""
GONE = "smoke/test_gone.py::test_gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A run of one case by torch's DDP and by an engine of a file, which counts its imports."""

    folder: Path
    imports: Path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    engine = folder / "counted.py"
    engine.write_text(ENGINE)
    engines = ["--engine", "torch.ddp", "--engine", f"{engine}:Counted"]
    options = ["--suite", "smoke", "-k", "trains", "--keep", "all"]
    assert main(["run", *engines, *options, "--out", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def made(original: Path, tmp_path: Path) -> Made:
    shutil.copytree(original / "run", tmp_path / "run")
    (original / "imports").unlink(missing_ok=True)
    return Made(folder=tmp_path / "run", imports=original / "imports")


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and JUDGED not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _judge(folder: Path) -> tuple[int, Run]:
    before = _files(folder)
    code = main(["judge", str(folder)])
    assert _files(folder) == before, "the run itself stays as it was"
    return code, read_run(folder / JUDGED)


def _rewritten(folder: Path, change: Callable[[Run], Run]) -> None:
    """Write a run again with other records or another header, as its author could."""
    run = change(read_run(folder))
    for name in (RECORDS, RUN, MANIFEST):
        (folder / name).unlink()
    shutil.move(folder / "observations", folder / "kept")
    write_run(folder, *run.records, header=run.header, footer=run.footer)
    if (folder / "kept").exists():
        shutil.rmtree(folder / "observations", ignore_errors=True)
        shutil.move(folder / "kept", folder / "observations")


def _evidence(record: Record) -> Record:
    return replace(record, duration_s=0.0, observation="")


def test_the_result_lies_beside_the_run_and_is_a_run(made: Made) -> None:
    before = read_run(made.folder)
    code, judged = _judge(made.folder)
    assert code == 0
    assert [_evidence(r) for r in judged.records] == [_evidence(r) for r in before.records]
    assert (judged.header, judged.problems) == (before.header, ())
    assert (made.folder / JUDGED / "report.md").exists()
    assert main(["diff", str(made.folder), str(made.folder / JUDGED)]) == 0
    assert main(["timeline", str(made.folder / JUDGED)]) == 0
    assert _judge(made.folder)[0] == 0, "an earlier result is replaced"


def test_no_engine_is_imported(made: Made, original: Path) -> None:
    assert _judge(made.folder)[0] == 0
    assert not made.imports.exists()
    (original / "counted.py").rename(original / "elsewhere.py")
    try:
        code, judged = _judge(made.folder)
    finally:
        (original / "elsewhere.py").rename(original / "counted.py")
    assert code == 0
    assert [r.engine_version for r in judged.records][1] == "counted 1"


def test_an_engine_that_only_the_header_names_is_not_imported(made: Made, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text("import pathlib\npathlib.Path(__file__).with_name('I_WAS_RUN').touch()\n")

    def add(run: Run) -> Run:
        stranger = replace(run.records[0], engine=f"{evil}:E")
        engines = (*run.header.engines, stranger.engine)
        assert run.footer is not None
        return replace(
            run,
            header=replace(run.header, engines=engines, num_cases=3),
            records=(*run.records, stranger),
            footer=replace(run.footer, counts={"PASSED": 3}),
        )

    _rewritten(made.folder, add)
    code, judged = _judge(made.folder)
    assert code == 1
    assert not (tmp_path / "I_WAS_RUN").exists()
    assert "not judged again: observations: none are kept" in judged.problems[0]
    assert f"{evil}:E" in judged.problems[0]


def test_a_case_that_does_not_exist_is_listed_and_not_green(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(run: Run) -> Run:
        assert run.footer is not None
        return replace(
            run,
            header=replace(run.header, num_cases=3),
            records=(*run.records, replace(run.records[0], case=GONE)),
            footer=replace(run.footer, counts={"PASSED": 3}),
        )

    _rewritten(made.folder, add)
    code, judged = _judge(made.folder)
    assert code == 1
    assert [r.verdict for r in judged.records] == [Verdict.PASSED] * 3, "an old verdict is kept"
    expected = f"not judged again: there is no such case: torch.ddp on {GONE} in threads:2"
    assert judged.problems == (expected,)
    assert expected in capsys.readouterr().out


def test_without_observations_verdicts_stay_and_are_listed(made: Made) -> None:
    before = read_run(made.folder)
    shutil.rmtree(made.folder / "observations")
    code, judged = _judge(made.folder)
    assert code == 1
    assert [_evidence(r) for r in judged.records] == [_evidence(r) for r in before.records]
    assert judged.problems == (
        "not judged again: observations: none are kept: torch.ddp on smoke/test_smoke.py::"
        "test_trains_the_same_model in threads:2, and 1 more",
    )


def test_an_unreadable_file_costs_one_record(made: Made) -> None:
    (journal,) = (made.folder / "observations" / "main" / "torch.ddp").rglob("rank1.ledger.jsonl")
    journal.write_bytes(journal.read_bytes().replace(b'"entry"', b'"en\xffry"', 1))
    code, judged = _judge(made.folder)
    assert code == 1
    assert [r.verdict for r in judged.records] == [Verdict.PASSED] * 2
    (problem,) = judged.problems
    assert problem.startswith("not judged again: ")
    assert "rank1.ledger.jsonl" in problem
    assert "torch.ddp on" in problem


def test_an_interrupted_run_stays_interrupted(made: Made) -> None:
    header, *_ = (made.folder / RUN).read_text().splitlines()
    (made.folder / RUN).write_text(f"{header}\n")
    code, judged = _judge(made.folder)
    assert code == 1
    assert judged.is_interrupted
    assert len(judged.records) == 2


def test_records_of_no_engine_or_world_are_listed(made: Made) -> None:
    lines = [json.loads(line) for line in (made.folder / RECORDS).read_text().splitlines()]
    strange = [{**lines[0], "engine": "no such engine"}, {**lines[0], "world": "moons:2"}]
    (made.folder / RECORDS).write_text("".join(f"{json.dumps(line)}\n" for line in strange))
    code, judged = _judge(made.folder)
    assert code == 1
    assert [r.verdict for r in judged.records] == [Verdict.PASSED] * 2
    assert any("in moons:2" in problem for problem in judged.problems)


def test_a_run_without_records_is_judged_to_nothing(made: Made) -> None:
    (made.folder / RECORDS).write_text("")
    code, judged = _judge(made.folder)
    assert (code, judged.records) == (1, ())
