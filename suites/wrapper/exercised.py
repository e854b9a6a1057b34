"""The case around an exercise of the wrapper's interface: its claims hold, and the engine still trains."""

from __future__ import annotations

from collections.abc import Callable

from shardproof import MatchesOracle, Notes, Trial
from suites.wrapper.claims import RIGHT
from suites.wrapper.exercising import exercise

__all__ = ["hold"]


def hold(trial: Trial, body: Callable[..., None], *subjects: str, arguments: tuple[object, ...] = ()) -> None:
    """Judge an engine by an exercise: it makes these claims, no others count, and they are right on every rank."""
    __tracebackhide__ = True
    training = exercise(body, *arguments)
    claims = (Notes(subject=subject, value=RIGHT, is_explained=True) for subject in subjects)
    trial.holds(training, MatchesOracle(), *claims)
