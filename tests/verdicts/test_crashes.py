"""The ledgers explain a crashed world: a disagreement of ranks comes before the signal."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof import Returned, TrialSession, Verdict
from shardproof.harness.records.saved_result import SavedResult
from shardproof.harness.runner import observations
from shardproof.harness.tracing.ledger import Ledger, Op
from shardproof.harness.verdicts.judgement import Judgement, judge_failure
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, TimedOut, WorldResult
from tests import judging
from tests.judging import judged
from tests.ledgers import entry, numbered

TWO_SIZES = (
    r"all_reduce\(sum, float32\[124\]\).* at tests/verdicts/disagreeing\.py:\d+ in prepare; .*"
    r"all_reduce\(sum, float32\[256\]\).* at tests/verdicts/disagreeing\.py:\d+ in prepare"
)
OURS = "/somewhere/site-packages/torch/distributed/distributed_c10d.py"
THEIRS = "/somewhere/my_engine.py"


@pytest.mark.parametrize(
    ("world", "headline"),
    [
        (
            "processes:2",
            rf"group \[0, 1] disagrees on call #0: .*{TWO_SIZES} \(then: rank \d was killed by SIGABRT\)$",
        ),
        (
            "threads:2",
            rf"collective #0 of group 0 \[0, 1\]: expected the same call on every rank, got .*{TWO_SIZES}",
        ),
    ],
)
def test_two_sizes_are_the_cause_and_not_the_signal(session: TrialSession, world: str, headline: str) -> None:
    record = judged(session, "tests.verdicts.disagreeing:ReducesTwoSizes", world, laws=())
    assert record.verdict is Verdict.FAILED
    assert re.match(headline, record.headline), record.headline
    assert record.hang is not None
    assert [rank.call is not None and rank.call.op for rank in record.hang.ranks] == ["all_reduce"] * 2


# The rest needs no world.

ALIKE = {rank: numbered([entry(Op.ALL_REDUCE)]) for rank in (0, 1)}
UNLIKE = {**ALIKE, 1: numbered([entry(Op.BROADCAST)])}


def _judged(ledgers: dict[int, Ledger], *outcomes: Outcome, leaks: tuple[str, ...] = ()) -> Judgement:
    result = WorldResult(outcomes=outcomes, leaks=leaks)
    return judge_failure(SavedResult(result=result, refusals={}, ledgers=(ledgers[0], ledgers[1]), ranks=()))


def _raised(file: str) -> Raised:
    trace = f'Traceback (most recent call last):\n  File "{THEIRS}", line 1, in step\n  File "{file}", line 2, in f\n'
    return Raised(rank=0, kind="RuntimeError", message="no", traceback=trace, is_symptom=False, at_s=0.0)


def _died(*, is_after_result: bool = False) -> Died:
    return Died(rank=0, exit_code=-6, is_attributed=True, text="", is_after_result=is_after_result)


def test_a_signal_alone_is_a_crash_with_an_hang() -> None:
    found = _judged(ALIKE, _died(), Abandoned(rank=1))
    assert (found.verdict, found.headline) == (Verdict.CRASHED, "rank 0 was killed by SIGABRT")
    assert found.hang is not None
    assert [rank.ended for rank in found.hang.ranks] == [
        "was killed by SIGABRT",
        "stopped because of another rank",
    ]


def test_a_signal_after_the_result_has_no_hang() -> None:
    found = _judged(ALIKE, _died(is_after_result=True), Returned(rank=1, value=None))
    assert (found.verdict, found.hang) == (Verdict.CRASHED, None)


@pytest.mark.parametrize("outcome", [_died(), _raised(OURS)], ids=["signal", "backend"])
def test_a_disagreement_comes_before_the_error_of_the_backend(outcome: Outcome) -> None:
    found = _judged(UNLIKE, outcome, Abandoned(rank=1), leaks=("rank 1 left a process",))
    assert found.verdict is Verdict.FAILED
    assert re.fullmatch(
        r"group \[0, 1\] disagrees on call #0: .*all_reduce.*broadcast.* \(then: rank 0 .*\); rank 1 left a process",
        found.headline,
    )
    assert found.hang is not None


def test_an_error_of_the_engine_comes_before_a_disagreement() -> None:
    found = _judged(UNLIKE, _raised(THEIRS), Abandoned(rank=1))
    assert found.verdict is Verdict.CRASHED
    assert found.headline.startswith(
        "rank 0 raised RuntimeError: no; before that group [0, 1] disagrees on call #0: "
    )
    assert found.hang is not None


def test_a_hang_tells_an_error_that_reads_like_its_consequence() -> None:
    late = TimedOut(rank=1, stack="", last_call="")
    symptom = replace(_raised(THEIRS), message="lease timed out", is_symptom=True)
    found = _judged(ALIKE, symptom, late)
    assert found.verdict is Verdict.HUNG
    ended = "; not ended at the deadline: rank(s) [1]; rank 0 raised RuntimeError: lease timed out"
    assert found.headline.endswith(ended)


def test_an_error_without_a_disagreement_is_reported_alone() -> None:
    for file in (OURS, THEIRS):
        found = _judged(ALIKE, _raised(file), Abandoned(rank=1))
        assert (found.verdict, found.hang) == (Verdict.CRASHED, None)
        assert found.headline == "rank 0 raised RuntimeError: no"


# Damaged files.


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
