"""A check of a user's model finds engines with a planted bug, and says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.user_model.models import GOOD, run_check

ENGINES = Path(__file__).with_name("planted_bugs.py")
NORMED = GOOD.replace("self.normed = nn.Linear(6, 6)", "self.normed = nn.BatchNorm1d(6)")
assert NORMED != GOOD


def test_the_engine_without_a_bug_is_proven(file: Path) -> None:
    file.write_text(NORMED)
    cases = "trains or until_the_last or evaluates or clips or resumes"
    assert run_check(file, f"{ENGINES}:OverDdp", "-k", cases) == 0


@pytest.mark.parametrize(
    ("engine", "case", "words"),
    [
        (
            "BroadcastsBuffers",
            "trains",
            "had forward begun with the buffer of rank 0: broadcast before forward",
        ),
        ("AveragesTwice", "trains", "the reference / 2: divided by the world size twice"),
        ("SkipsTheLast", "trains", "only this rank's own gradient: not synchronised"),
        (
            "ForgetsMoments",
            "resumes",
            "in a whole state that was handed out, optimizer: 'blocks.0.weight/exp_avg_sq'",
        ),
        ("ScalesAccumulationTwice", "until_the_last", "updated by 1/3 x the gradient that was read"),
        ("DropsWhatWasHeld", "until_the_last", "only the last microbatch"),
        ("ReportsAShareOfTheNorm", "clips", "half the reference"),
        ("StopsAfterEvaluation", "evaluates", "only this rank's own gradient: not synchronised"),
        ("StopsAfterTwoSteps", "trains", "step 2, gradient"),
    ],
)
def test_a_bug_is_found_and_named(
    file: Path, engine: str, case: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(NORMED)
    assert run_check(file, f"{ENGINES}:{engine}", "-k", case) == 1
    assert words in " ".join(capsys.readouterr().out.split())
