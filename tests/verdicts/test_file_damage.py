"""A rank that damages files or messages of its own case fails at once, and the headline names rank and file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shardproof import TrialSession, Verdict
from shardproof.harness.runner import observations
from tests import judging

THREADS, PROCESSES = "threads:2", "processes:2"
SOON_S = 15.0  # far from the deadline, for busy machines
BY = {
    "appends_half_a_line": r"rank1\.ledger\.jsonl \(1 damaged line\(s\), the first in line \d+\)",
    "appends_a_mark": r"rank1\.ledger\.jsonl \(changed\)",
    "drops_lines": r"rank1\.ledger\.jsonl \(changed\)",
    "removes_its_journal": r"rank1\.ledger\.jsonl \(missing\)",
    "makes_its_journal_huge": r"rank1\.ledger\.jsonl \(missing\)",
    "removes_its_observation": r"rank1\.observation \(missing\)",
    "forges_an_observation": r"rank1\.observation \(changed\)",
    "makes_pipes": r"rank1\.observation \(missing\)",
}


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
@pytest.mark.parametrize("engine", BY)
def test_damaging_the_files_of_a_rank_fails(engine: str, world: str, session: TrialSession) -> None:
    record = judging.judged(session, f"tests.verdicts.file_damage:{engine}", world, within_s=SOON_S)
    assert record.verdict is Verdict.FAILED, record.headline
    expected = f"files of rank 1 were changed or removed while the case ran: {BY[engine]}"
    assert re.fullmatch(expected, record.headline), record.headline


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
def test_a_folder_that_is_gone_fails(world: str, session: TrialSession) -> None:
    record = judging.judged(session, "tests.verdicts.file_damage:removes_the_folder", world, within_s=SOON_S)
    assert record.verdict is Verdict.FAILED, record.headline
    for name in ("rank0.ledger.jsonl", "rank0.observation"):
        assert f"{name} (missing)" in record.headline


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
def test_a_result_that_is_sent_and_not_trained_for_fails(world: str, session: TrialSession) -> None:
    record = judging.judged(session, "tests.verdicts.file_damage:forges_its_result", world, within_s=SOON_S)
    assert record.verdict in {Verdict.FAILED, Verdict.CRASHED}, record.headline
    assert "rank 1" in record.headline


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
def test_pipes_in_place_of_files_hold_up_no_verdict(world: str, session: TrialSession) -> None:
    record = judging.judged(session, "tests.verdicts.file_damage:dies_behind_pipes", world, within_s=SOON_S)
    assert record.verdict is Verdict.CRASHED
    assert record.headline.startswith("rank 1 was killed by SIGKILL")


def test_a_message_in_the_name_of_another_process_is_blamed_on_its_sender(session: TrialSession) -> None:
    record = judging.judged(session, "tests.verdicts.file_damage:blames_another", PROCESSES, within_s=SOON_S)
    assert record.verdict is Verdict.CRASHED
    assert record.headline.startswith("rank 1 raised GarbledMessage"), record.headline


def test_what_a_later_case_damages_is_no_evidence_for_another(
    session: TrialSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observations, "_MOST_KEPT", 1)
    assert judging.judged(session, "torch.ddp").verdict is Verdict.PASSED
    (observation,) = tmp_path.rglob("rank1.observation")
    assert judging.judged(session, "reference").verdict is Verdict.PASSED
    shutil.copy(observation.with_name("rank0.observation"), observation)
    record = judging.judged(session, "torch.ddp")
    assert record.verdict is Verdict.ERRORED, record.headline
    assert (
        "rank1.observation: expected the file as it was kept, got changed since it was written"
        in record.headline
    )
