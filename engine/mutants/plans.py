"""Misreadings of plans: functions that change a plan before an honest engine prepares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardproof.engine.contract import Capability, Plan, Prefetch


# Any: fields of a plan.
def changing(**fields: Any) -> Callable[[Plan], Plan]:
    """Return a function that sets these fields of a plan."""
    return lambda plan: replace(plan, **fields)


def undemanding(capability: Capability) -> Callable[[Plan], Plan]:
    """Return a function that removes a demand from a plan."""
    return lambda plan: replace(plan, demands=plan.demands - {capability})


Lists = tuple[tuple[str, tuple[str, ...]], ...]


def changing_lists(change: Callable[[Lists, tuple[str, ...]], Lists]) -> Callable[[Plan], Plan]:
    """Return a function that changes both prefetch lists of a plan: ``change`` takes a list, and the units in order."""

    def changed(plan: Plan) -> Plan:
        if plan.prefetch is None:
            return plan
        forward = change(plan.prefetch.forward, plan.units)
        backward = change(plan.prefetch.backward, plan.units[::-1])
        return replace(plan, prefetch=Prefetch(forward=forward, backward=backward))

    return changed
