"""The ledgers explain a crashed world: a disagreement of ranks comes before the signal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardproof import Returned, TrialSession, Verdict
from shardproof.harness.records.saved_result import SavedResult
from shardproof.harness.tracing.ledger import Ledger, Op
from shardproof.harness.verdicts.judgement import Judgement, judge_failure
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, TimedOut, WorldResult
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
