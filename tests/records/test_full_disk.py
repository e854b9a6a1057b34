"""A full disk ends a run with an error message and the exit code of wrong usage, and written records stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.live_run import LiveRun
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import RUN, read_run
from shardproof.harness.tracing.ledger import ViolationKind
from shardproof.harness.tracing.recorder import Recorder

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
