"""Private objects of the reference engine that mutants change: states, groups of parameters, and contexts."""

from __future__ import annotations

from shardproof.engine.contract import PreparedModel
from shardproof.engine.reference.comm_context import CommContext
from shardproof.engine.reference.fsdp_state import FSDPState, states_in
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.param_layout import ParamLayout


def reference_units(prepared: PreparedModel) -> tuple[FSDPState, ...]:
    """Return the states of a model that the reference engine prepared, each once."""
    return states_in(prepared.module)


def reference_groups(prepared: PreparedModel) -> list[FSDPParamGroup]:
    """Return the groups of parameters of all states."""
    return [group for state in reference_units(prepared) for group in state.param_groups]


def layouts(prepared: PreparedModel) -> list[ParamLayout]:
    """Return the layouts of the groups' parameters."""
    return [group.layout for group in reference_groups(prepared)]


def comm_contexts_of(prepared: PreparedModel) -> list[CommContext]:
    """Return the contexts of all states, each once; once the root has run, all states share its own."""
    return list(dict.fromkeys(state.comm_ctx for state in reference_units(prepared)))
