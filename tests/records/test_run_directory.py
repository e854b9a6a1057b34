"""A run survives interruption, refuses to be overwritten, and names files that are not whole."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from campaigns.live_run import LiveRun
from shardproof.harness.errors import HarnessBug, UsageError
from shardproof.harness.records import provenance
from shardproof.harness.records.manifest import MANIFEST
from shardproof.harness.records.record import SCHEMA_VERSION, Header, Verdict, to_json
from shardproof.harness.records.run import RECORDS, RUN, RunWriter, read_run, write_file
from shardproof.harness.tracing.ledger import ViolationKind
from shardproof.harness.tracing.recorder import Recorder
from tests import sample_records
from tests.sample_records import a_record
from tests.shell import ROOT, python

HEADER = dataclasses.replace(sample_records.HEADER, num_cases=3)
FOOTER = dataclasses.replace(sample_records.FOOTER, counts={"PASSED": 3})
ODD = "all laws held\u2028"  # a line end to str.splitlines, not to JSON lines
THREE = tuple(a_record(Verdict.PASSED, case=case, headline=ODD) for case in "abc")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    writer = RunWriter(tmp_path / "run", HEADER)
    for record in THREE:
        writer.append(record)
    writer.finish(FOOTER)
    return writer.path


def test_a_finished_run_is_read_back_whole(finished: Path) -> None:
    run = read_run(finished)
    assert (run.header, run.records, run.footer, run.problems) == (HEADER, THREE, FOOTER, ())


def test_equal_parts_of_records_are_read_as_one(finished: Path) -> None:
    first, *others = read_run(finished).records
    for other in others:
        assert other.laws
        assert all(a is b for a, b in zip(other.laws, first.laws, strict=True))
        assert other.headline is first.headline


def test_records_have_a_file_to_themselves(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / RECORDS).read_text().splitlines()]
    assert [line["case"] for line in lines] == ["a", "b", "c"]
    assert all({"engine", "case", "world", "verdict"} <= line.keys() for line in lines)
    kinds = [json.loads(line)["kind"] for line in (finished / RUN).read_text().splitlines()]
    assert kinds == ["header", "footer"]


def test_a_record_that_is_changed_while_the_run_goes_on_is_noticed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, dataclasses.replace(HEADER, num_cases=1))
    writer.append(a_record(Verdict.FAILED))
    text = (tmp_path / RECORDS).read_text()
    (tmp_path / RECORDS).write_text(text.replace('"FAILED"', '"PASSED"'))
    writer.finish(dataclasses.replace(FOOTER, counts={"FAILED": 1}))
    run = read_run(tmp_path)
    assert [record.verdict for record in run.records] == [Verdict.PASSED]
    assert run.is_damaged
    assert run.problems == ("records.jsonl: changed since it was written",)


def test_a_run_without_footer_is_interrupted(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, HEADER)
    writer.append(THREE[0])
    run = read_run(tmp_path)
    assert run.is_interrupted
    assert run.records == THREE[:1]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_last_line_that_is_cut_off_is_reported_and_skipped(finished: Path, cut: int) -> None:
    whole = (finished / RECORDS).read_bytes()
    (finished / RECORDS).write_bytes(whole[: -1 - cut])
    run = read_run(finished)
    assert run.records == THREE[:2]
    assert "records.jsonl:3" in run.problems[0]


def test_a_last_line_that_lacks_only_its_newline_is_a_record(finished: Path) -> None:
    whole = (finished / RECORDS).read_bytes()
    (finished / RECORDS).write_bytes(whole[:-1])
    assert read_run(finished).records == THREE
    assert read_run(finished).problems == ("records.jsonl: changed since it was written",)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_line_costs_one_record(finished: Path, number: int) -> None:
    lines = (finished / RECORDS).read_text().split("\n")
    lines[number - 1] = lines[number - 1][:40]
    (finished / RECORDS).write_text("\n".join(lines))
    run = read_run(finished)
    assert len(run.records) == 2
    assert run.problems[0].startswith(f"records.jsonl:{number}: damaged, skipped: expected one JSON object")
    assert run.is_damaged


def test_a_footer_that_is_cut_off_means_interrupted(finished: Path) -> None:
    (finished / RUN).write_bytes((finished / RUN).read_bytes()[:-9])
    run = read_run(finished)
    assert run.footer is None
    assert "run.jsonl:2" in run.problems[0]


def test_two_runs_in_one_file_are_not_whole(finished: Path) -> None:
    (finished / RUN).write_bytes((finished / RUN).read_bytes() * 2)
    run = read_run(finished)
    assert run.problems[0] == "run.jsonl:3: 2 more lines after the footer, skipped"
    assert run.footer == FOOTER


@pytest.mark.parametrize("name", [RECORDS, RUN])
def test_a_missing_file_is_a_usage_error(finished: Path, name: str) -> None:
    (finished / name).unlink()
    with pytest.raises(UsageError, match=name):
        read_run(finished)


def test_a_missing_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        read_run(tmp_path / "nowhere")


def test_records_stand_in_for_a_damaged_header(finished: Path) -> None:
    (finished / RUN).write_text("")
    run = read_run(finished)
    assert run.problems[0].startswith("run.jsonl:1: damaged, skipped: ")
    assert (run.records, run.header.engines, run.header.num_cases) == (THREE, ("torch.fsdp2",), 3)
    (finished / RECORDS).write_text("")
    with pytest.raises(UsageError, match=r"run\.jsonl:1"):
        read_run(finished)


def test_a_run_of_a_later_release_is_refused(finished: Path) -> None:
    text = (finished / RUN).read_text()
    (finished / RUN).write_text(text.replace(f'"schema":{SCHEMA_VERSION}', f'"schema":{SCHEMA_VERSION + 1}'))
    with pytest.raises(UsageError, match="the newer shardproof that wrote this run"):
        read_run(finished)


def test_a_changed_byte_is_noticed(finished: Path) -> None:
    text = (finished / RECORDS).read_text()
    (finished / RECORDS).write_text(text.replace("all laws held", "all laws hold"))
    assert read_run(finished).problems == ("records.jsonl: changed since it was written",)
    (finished / MANIFEST).unlink()
    assert read_run(finished).problems == ("SHA256SUMS: missing",)


def test_missing_and_repeated_records_are_reported(finished: Path) -> None:
    lines = (finished / RECORDS).read_text().splitlines(keepends=True)
    (finished / RECORDS).write_text("".join((*lines[:2], lines[0])))
    problems = " | ".join(read_run(finished).problems)
    assert "2 records of torch.fsdp2 on a in threads:2" in problems
    assert "announces 3 cases; there are records of 2" in problems


def test_lost_records_are_detected_by_the_count_of_the_footer(finished: Path) -> None:
    header = dataclasses.replace(HEADER, num_cases=2)
    lines = (finished / RECORDS).read_text().splitlines(keepends=True)
    (finished / RECORDS).write_text("".join(lines[:2]))
    (finished / RUN).write_text(f"{to_json(header)}\n{to_json(FOOTER)}\n")
    assert read_run(finished).problems[-1] == "the footer counts 3 records; there are 2"


def test_an_existing_run_is_never_overwritten(finished: Path) -> None:
    before = (finished / RECORDS).read_bytes()
    with pytest.raises(UsageError, match=r"run\.jsonl, records\.jsonl; try another --out"):
        RunWriter(finished, HEADER)
    assert (finished / RECORDS).read_bytes() == before


def test_leftover_observations_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    (tmp_path / "observations" / "old").mkdir(parents=True)
    with pytest.raises(UsageError, match="observations/"):
        RunWriter(tmp_path, HEADER)


def test_a_run_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="expected a folder, got a file"):
        RunWriter(tmp_path / "file", HEADER)
    with pytest.raises(UsageError, match="writing"):
        RunWriter(tmp_path / "file" / "below", HEADER)


def test_nothing_follows_the_footer(finished: Path, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "other", HEADER)
    writer.finish(FOOTER)
    with pytest.raises(HarnessBug):
        writer.append(THREE[0])
    with pytest.raises(HarnessBug):
        writer.finish(FOOTER)


def test_a_record_that_could_not_be_read_back_is_refused_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, HEADER)
    broken = dataclasses.replace(THREE[0], headline=None)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(HarnessBug, match="headline"):
        writer.append(broken)
    writer.append(THREE[0])
    assert read_run(tmp_path).records == THREE[:1]


def test_a_full_disk_loses_nothing_written_before(tmp_path: Path) -> None:
    """A limit on file size makes the kernel write half a line and then refuse, as a full disk does."""
    body = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from shardproof.harness.records.run import RunWriter\n"
        "from shardproof.harness.errors import UsageError\n"
        "from tests.records.test_run_directory import HEADER, THREE\n"
        "writer = RunWriter(Path(sys.argv[1]), HEADER)\n"
        "writer.append(THREE[0]); writer.append(THREE[1])\n"
        "size = (writer.path / 'records.jsonl').stat().st_size\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))\n"
        "try: writer.append(THREE[2])\n"
        "except UsageError as error: print(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, limits)\n"
        "writer.append(THREE[2])\n"
    )
    done = python("-c", body, str(tmp_path / "run"), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "try freeing space" in done.stdout
    assert read_run(tmp_path / "run").records == THREE


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    write_file(target, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UsageError, match=r"writing .*report\.md"):
            write_file(target, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_header_records_the_machine_and_the_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def describe() -> Header:
        return provenance.header(command="c", engines=["e"], worlds=["threads:2"], seed=1, num_cases=2)

    here = describe()
    assert {"python", "torch", "pytest", "shardproof"} == here.versions.keys()
    assert here.versions["pytest"] == pytest.__version__
    assert int(here.hardware["memory_bytes"]) > 2**20
    assert int(here.hardware["cores"]) >= 1
    assert here.started_at.endswith("+00:00")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (describe().git_head, describe().git_dirty) == ("unknown", False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe().git_head == "unknown"


def test_the_header_knows_the_commit_and_whether_files_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        done = subprocess.run(["git", *author, *arguments], capture_output=True, check=True, text=True)
        return done.stdout.strip()

    def describe() -> Header:
        return provenance.header(command="c", engines=[], worlds=[], seed=0, num_cases=0)

    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    (tmp_path / "untracked").touch()
    assert (describe().git_head, describe().git_dirty) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("two")
    assert describe().git_dirty


def test_the_footer_counts_verdicts() -> None:
    footer = provenance.footer(verdicts=[Verdict.PASSED, Verdict.PASSED, Verdict.HUNG], duration_s=2.0)
    assert footer.counts == {"PASSED": 2, "HUNG": 1}


# A full disk.


LIMIT_S = 60.0
ARGUMENTS = [
    "--engine=torch.ddp",
    "--suite=smoke",
    "--world=threads:2",
    "--world=processes:2",
    "--no-expectations",
]
FULL = "expected a writable folder with room"


def _run(folder: Path, longest_file: int) -> LiveRun:
    run = LiveRun(folder, ARGUMENTS, longest_file=longest_file)
    try:
        assert run.ended(LIMIT_S) == 2, run.said()
        assert FULL in run.said()
        assert "INTERNALERROR" not in run.said()
        assert run.orphans(LIMIT_S) == []
        assert run.litter() == []
    finally:
        run.end()
    return run


@pytest.mark.slow
def test_a_run_without_room_for_its_header_names_the_full_disk(short_folder: Path) -> None:
    run = _run(short_folder, 500)
    assert run.records() == []
    assert not (run.out / RUN).exists(), "a folder without a header is no run"


@pytest.mark.slow
def test_written_records_stay_when_the_disk_is_full(short_folder: Path) -> None:
    run = _run(short_folder, 3_000)
    found = read_run(run.out)
    assert found.is_interrupted
    assert 0 < len(found.records) < 4
    assert Verdict.PASSED not in {record.verdict for record in found.records}, (
        "no observation fits on the disk"
    )


def test_a_ledger_of_which_a_part_was_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path / "journal")
    recorder.enter_unit("layer")
    monkeypatch.setattr("os.write", lambda _, text: len(text) - 1)
    with pytest.raises(OSError, match="is the disk full"):
        recorder.close()
    recorder.close()  # it is still closed


def test_a_ledger_that_lost_a_line_is_an_error_even_if_the_engine_hides_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path / "journal")
    with monkeypatch.context() as patched:
        patched.setattr("os.write", lambda _, text: len(text) - 1)
        with pytest.raises(OSError, match="is the disk full"):
            recorder.record_violation(0, ViolationKind.INPUT_FREED, "here")
    recorder.record_violation(0, ViolationKind.INPUT_FREED, "here")
    with pytest.raises(OSError, match="is the disk full"):
        recorder.close()
    assert (tmp_path / "journal").read_bytes() == b"", "no line follows half a line"
