"""The case around an exercise of the wrapper's interface: its claims hold, and the engine still trains."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract import Layout, Plan
from fixtures.optimizers import SGD
from fixtures.problems import MLP_EVEN
from harness.case import Schedule, Training
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial
from harness.scripts.exercise import Exercise
from harness.states import Notes
from suites.wrapper.claims import RIGHT

__all__ = ["hold"]


def hold(trial: Trial, body: Callable[..., None], *subjects: str, arguments: tuple[object, ...] = ()) -> None:
    """Judge an engine by an exercise: it makes these claims, no others count, and they are right on every rank."""
    __tracebackhide__ = True
    script = Exercise(body=body, arguments=arguments)
    training = Training(
        problem=MLP_EVEN,
        optimizer=SGD,
        plan=Plan(layout=Layout.SHARD, demands=script.demands),
        schedule=Schedule(steps=1),
        script=script,
    )
    trial.holds(training, MatchesOracle(), *(Notes(subject=subject, value=RIGHT) for subject in subjects))
