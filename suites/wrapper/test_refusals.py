"""Arguments that contradict each other, or that mean nothing, are refused where the wrapper is made."""

from __future__ import annotations

import pytest

from shardproof import MatchesOracle, Notes, Trial
from suites.wrapper.exercises.refusals import REFUSAL, refuses
from suites.wrapper.exercising import exercise

# The names of the interface that an attempt is about.
ATTEMPTS = {
    "groups and mesh": ("process_group", "device_mesh"),
    "ignored twice": ("ignored_modules", "ignored_states"),
    "ignored mixture": ("ignored_states",),
    "ignored parameters as modules": ("ignored_modules",),
    "hybrid on one axis": ("device_mesh", "sharding_strategy"),
    "hybrid in one group": ("process_group", "sharding_strategy"),
    "hybrid nowhere": ("sharding_strategy",),
    "initialiser": ("param_init_fn",),
    "policy of numbers": ("auto_wrap_policy", "CustomPolicy"),
    "wrapped before": ("auto_wrap_policy",),
    "frozen in part": ("use_orig_params", "auto_wrap_policy"),
}
ACCEPTS = {"policy of numbers": "IgnoresOverridesOfAPolicy"}


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param(
            attempt,
            id=attempt.replace(" ", "-"),
            marks=[pytest.mark.api(*names), pytest.mark.kills(ACCEPTS.get(attempt, "AcceptsContradictions"))],
        )
        for attempt, names in ATTEMPTS.items()
    ],
)
def test_refuses_what_has_no_meaning(trial: Trial, attempt: str) -> None:
    trial.holds(exercise(refuses, attempt), Notes(subject=REFUSAL, value="ValueError"), MatchesOracle())
