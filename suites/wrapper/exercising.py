"""Trainings in which ranks exercise an engine's own interface before they train a model of the case's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fixtures.optimizers import SGD
from fixtures.problems import MLP_EVEN
from shardproof import Exercise, Layout, Plan, Schedule, Training, Wrapper

__all__ = ["exercise"]


# Any: whatever the body takes.
def exercise(body: Callable[..., None], *arguments: Any, wrapper: Wrapper | None = None) -> Training:
    """Have every rank call ``body(bench, *arguments)`` once, then train one step."""
    script = Exercise(body=body, arguments=arguments)
    plan = Plan(layout=Layout.SHARD, wrapper=wrapper, demands=script.demands)
    return Training(problem=MLP_EVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=1), script=script)
