"""A check of a user's model finds engines with a planted bug, or mutants, and says what is wrong."""

from __future__ import annotations

import pytest

from tests.user_model import planted_bugs
from tests.user_model.models import GOOD, Check

ENGINES = planted_bugs.__file__
NORMED = GOOD.replace("self.normed = nn.Linear(6, 6)", "self.normed = nn.BatchNorm1d(6)")
assert NORMED != GOOD


def test_the_engine_without_a_bug_is_proven(check: Check) -> None:
    cases = "trains or until_the_last or evaluates or clips or resumes"
    check(f"{ENGINES}:OverDdp", "-k", cases, text=NORMED)


@pytest.mark.parametrize(
    ("engine", "case", "words"),
    [
        (
            "BroadcastsBuffers",
            "trains",
            "had forward begun with the buffer of rank 0: broadcast before forward",
        ),
        ("AveragesTwice", "trains", "the reference / 2: divided by the world size twice"),
        ("ForgetsToSynchroniseOneParameter", "trains", "only this rank's own gradient: not synchronised"),
        (
            "ForgetsMoments",
            "resumes",
            "handed out to be what the ranks hold, got optimizer: 'blocks.0.weight/exp_avg_sq'",
        ),
        ("ScalesAccumulationTwice", "until_the_last", "updated by 1/3 x the gradient that was read"),
        ("KeepsOnlyTheLastMicrobatch", "until_the_last", "only the last microbatch"),
        ("ReportsAShareOfTheNorm", "clips", "half the reference"),
        ("StopsAfterTwoSteps", "trains", "step 2, gradient"),
    ],
)
def test_a_bug_is_found_and_named(engine: str, case: str, words: str, check: Check) -> None:
    spec = f"{ENGINES}:{engine}" if hasattr(planted_bugs, engine) else engine
    assert words in check(spec, "-k", case, text=NORMED, code=1)
