"""Plans, and the conditions made of them, that several mutants need to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardproof.engine.contract import Capability, Grouping, Layout, Plan, Prefetch, Reshard, Wrapper
from shardproof.engine.mutants.mutant import Condition


def demanding(*capabilities: Capability) -> Plan:
    """Return a plan with these demands and no other option."""
    return Plan(demands=frozenset(capabilities))


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


UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
SHARDED_BLOCKS = Plan(
    layout=Layout.SHARD, units=UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
)
HYBRID_BLOCKS = replace(SHARDED_BLOCKS, layout=Layout.HYBRID)
WRAPPED = Plan(layout=Layout.SHARD, wrapper=Wrapper())
CALLS_METHODS = demanding(Capability.WRAPPER)

ONE_RANK = Condition(world_size=1)
SECOND_STEP = Condition(world_size=1, steps=2, because="the first step has no step before it")
SHARDED = Condition(plan=Plan(layout=Layout.SHARD), because="one rank's share is the whole")
HYBRID = Condition(plan=Plan(layout=Layout.HYBRID), because="only a hybrid layout has replicas")
ON_BLOCKS = Condition(plan=SHARDED_BLOCKS, because="one rank gathers and reduces nothing")
WRAPS = Condition(plan=WRAPPED, because="other options of the wrapper are honoured")
CALLS = Condition(plan=CALLS_METHODS, because="training alone calls no such method")
