"""Private objects of FSDP2 and the reference engine that mutants change: streams of units, and groups of parameters.

Changes affect one prepared model, never objects that other engines in the process share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from shardproof.engine.contract import PreparedModel
from shardproof.engine.mutants.patches import KeepingFsdp2, Spoil, after, before
from shardproof.engine.reference.comm_context import CommContext
from shardproof.engine.reference.fsdp_state import FSDPState, states_in
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.param_layout import ParamLayout
from shardproof.engine.reference.parameter import FSDPParam

# Any, throughout: FSDP2's private classes and the streams of a device have no public types.


Keep = Callable[[list[Any], Any], None]  # receives the list of kept objects, and a group


def in_context(fault: Callable[[Any], None]) -> Spoil:
    """Call ``fault`` with the context that the units of a root share, as soon as it has streams."""

    def spoil(prepared: PreparedModel) -> PreparedModel:
        for state in states(prepared):
            after(state._comm_ctx, "lazy_init", fault)
        return prepared

    return spoil


def after_method(method: str, fault: Callable[[Any], None]) -> Spoil:
    """Call ``fault`` with each group after each call of its method."""
    return _in_groups(after, method, fault)


def before_method(method: str, fault: Callable[[Any], None]) -> Spoil:
    """Call ``fault`` with each group before each call of its method."""
    return _in_groups(before, method, fault)


def keeping(place: Callable[[str, Callable[[Any], None]], Spoil], method: str, keep: Keep) -> Spoil:
    """Keep memory in a model that it should free: ``place`` is one of the two above, ``keep`` adds to the list."""

    def spoil(prepared: PreparedModel) -> PreparedModel:
        assert isinstance(prepared, KeepingFsdp2)
        return place(method, partial(keep, prepared.kept))(prepared)

    return spoil


def _in_groups(when: Callable[..., None], method: str, fault: Callable[[Any], None]) -> Spoil:
    def spoil(prepared: PreparedModel) -> PreparedModel:
        for group in groups(prepared):
            when(group, method, fault)
        return prepared

    return spoil


def deaf(stream: str) -> Callable[[Any], None]:
    """Make this stream wait for no other; it still waits for single events."""

    def fault(context: Any) -> None:
        getattr(context, stream).wait_stream = ignore

    return fault


def deaf_in(stream: str, function: str) -> Callable[[Any], None]:
    """Make this stream wait for no other when ``function`` asks it to."""

    def fault(context: Any) -> None:
        selected = getattr(context, stream)
        wait = selected.wait_stream

        def sometimes(other: Any) -> None:
            if _caller() != function:
                wait(other)

        selected.wait_stream = sometimes

    return fault


# FSDP2 waits through these since torch 2.15; before it waited itself.
_BY_WAY_OF = frozenset({"release_all_gather_state_for_comm_reuse", "wait_all_gather_streams_on_event"})


def _caller() -> str:
    """Return the name of FSDP2's function that waits, through whichever helper."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in _BY_WAY_OF and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name


def ignore(*_: Any) -> None:
    """Do nothing."""


def states(prepared: PreparedModel) -> list[Any]:
    """Return FSDP2's state of each unit."""
    modules: list[Any] = list(prepared.module.modules())
    return list(dict.fromkeys(m._get_fsdp_state() for m in modules if hasattr(m, "_get_fsdp_state")))


def groups(prepared: PreparedModel) -> list[Any]:
    """Return the groups of all units; until torch 2.11 a unit had at most one, under another name."""
    found = []
    for state in states(prepared):
        if hasattr(state, "_fsdp_param_groups"):
            found += state._fsdp_param_groups
        elif state._fsdp_param_group is not None:
            found.append(state._fsdp_param_group)
    return found


def forget_reduce_inputs(group: Any) -> None:
    """Forget the inputs of reductions that are kept with their events; until torch 2.11 at most one."""
    if hasattr(group.comm_ctx, "reduce_scatter_states"):
        group.comm_ctx.reduce_scatter_states.clear()
    else:
        group.comm_ctx.reduce_scatter_state = None


def reference_units(prepared: PreparedModel) -> tuple[FSDPState, ...]:
    """Return the states of a model that the reference engine prepared, each once."""
    return states_in(prepared.module)


def reference_groups(prepared: PreparedModel) -> list[FSDPParamGroup]:
    """Return the groups of parameters of all states."""
    return [group for state in reference_units(prepared) for group in state.param_groups]


def reference_parameters(prepared: PreparedModel) -> list[FSDPParam]:
    """Return the engine's parameters in all groups."""
    return [parameter for group in reference_groups(prepared) for parameter in group.parameters]


def layouts(prepared: PreparedModel) -> list[ParamLayout]:
    """Return the layouts of the groups' parameters."""
    return [group.layout for group in reference_groups(prepared)]


def comm_contexts_of(prepared: PreparedModel) -> list[CommContext]:
    """Return the contexts of all states, each once; once the root has run, all states share its own."""
    return list(dict.fromkeys(state.comm_ctx for state in reference_units(prepared)))
