"""Optimizer states of wrapped models on their way out: whole, sharded or local, by original names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engine.reference.group import Group
from engine.reference.optimizer_state import (
    NamedState,
    Owned,
    ParameterState,
    Snapshot,
    all_owned,
    copied,
    is_like,
    named_groups,
    part_of,
)
from engine.reference.whole import arrangement_of, gathered
from engine.reference.wrapper_state import sharded_over

__all__ = ["local_state", "sharded_state", "whole_state"]


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any], *, offloads: bool
) -> NamedState:
    """Gather the whole of ``states``, a state dict of ``optimizer``, on every rank. Collective over shard groups."""

    def export(whole: torch.Tensor, _: Group) -> torch.Tensor:
        return whole.cpu() if offloads else whole.clone()

    return _exported(model, Snapshot.of(optimizer, states), export)


def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any], *, offloads: bool
) -> NamedState:
    """Gather, and keep of each tensor the share of dim 0 that this rank is to save, as a DTensor. Collective."""

    def export(whole: torch.Tensor, group: Group) -> torch.Tensor:
        if group.mesh.shard_group is None:
            return whole.clone()
        spread = sharded_over(whole, group)
        return spread.cpu() if offloads else spread

    return _exported(model, Snapshot.of(optimizer, states), export)


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> NamedState:
    """Give each rank what it holds: 1-D parts that fit the same wrapping on the same ranks alone."""
    snapshot = Snapshot.of(optimizer, states)
    state: dict[str, Any] = {}
    for owned in all_owned(model):
        found = snapshot.state.get(owned.parameter, {})
        for name, piece in owned.pieces:
            if found:
                state[name] = {key: copied(part_of(value, owned, piece)) for key, value in found.items()}
    return {"state": state, "param_groups": named_groups(model, snapshot)}


def _exported(
    model: nn.Module,
    snapshot: Snapshot,
    export: Callable[[torch.Tensor, Group], torch.Tensor],
) -> NamedState:
    state: dict[str, Any] = {}
    loose = []
    by_group: dict[Group, list[Owned]] = {}
    for owned in all_owned(model):
        if owned.group is None:
            loose.append(owned)
        else:
            by_group.setdefault(owned.group, []).append(owned)
    for group, members in by_group.items():
        for name, values in _gathered_states(group, members, snapshot).items():
            state[name] = {
                key: export(value.tensor, group) if isinstance(value, _Gathered) else copied(value)
                for key, value in values.items()
            }
    for owned in loose:
        if owned.parameter in snapshot.state:
            state[owned.pieces[0][0]] = {
                key: copied(value) for key, value in snapshot.state[owned.parameter].items()
            }
    order = [name for group in named_groups(model, snapshot) for name in group["params"]]
    return {
        "state": {name: state[name] for name in order if name in state},
        "param_groups": named_groups(model, snapshot),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered:
    """A tensor that was gathered, told apart from those that are kept as they are."""

    tensor: torch.Tensor


def _gathered_states(group: Group, members: Iterable[Owned], snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Gather the states of one group's parameters: those of a key together, as the parameters are."""
    states = {owned.parameter: snapshot.state.get(owned.parameter, {}) for owned in members}
    flat = arrangement_of(group)
    names = {piece: name for owned in members for name, piece in owned.pieces if piece is not None}
    described = _agreed(group, _description(members, states))
    made: dict[str, dict[str, Any]] = {}
    for key, dtype in described.gathered.items():
        share = torch.zeros(flat.share_numel, dtype=dtype, device=flat.memory.device)
        for owned in members:
            value = states[owned.parameter].get(key)
            if value is None:
                continue
            for _, piece in owned.pieces:
                assert piece is not None
                part = part_of(value, owned, piece)
                share[piece.offset : piece.offset + piece.local_numel].copy_(part.reshape(-1))
        whole = gathered(share, group)
        for piece, name in names.items():
            if name in described.names:
                view = whole[piece.start : piece.start + piece.shape.numel()].view(piece.shape)
                made.setdefault(name, {})[key] = _Gathered(view)
    for name, values in described.kept.items():
        made.setdefault(name, {}).update(values)
    return made


@dataclass(slots=True, kw_only=True)
class _Description:
    """What states there are: the dtype of each key that is gathered, values that are kept, who has any."""

    gathered: dict[str, torch.dtype]
    kept: dict[str, dict[str, Any]]
    names: set[str]


def _description(members: Iterable[Owned], states: Mapping[nn.Parameter, ParameterState]) -> _Description:
    found = _Description(gathered={}, kept={}, names=set())
    for owned in members:
        for key, value in states[owned.parameter].items():
            names = [name for name, _ in owned.pieces]
            found.names.update(names)
            if is_like(value, owned.parameter):
                found.gathered[key] = value.dtype
            else:
                for name in names:
                    found.kept.setdefault(name, {})[key] = value
    return found


def _agreed(group: Group, mine: _Description) -> _Description:
    """Join what the ranks of a group have: one without an element of a parameter may lack its state."""
    if group.mesh.shard_group is None or group.mesh.shard_size == 1:
        return mine
    everyone: list[Any] = [None] * group.mesh.shard_size
    dist.all_gather_object(everyone, mine, group=group.mesh.shard_group)
    joined = _Description(gathered={}, kept={}, names=set())
    for other in everyone:
        joined.gathered.update(other.gathered)
        joined.names |= other.names
        for name, values in other.kept.items():
            joined.kept.setdefault(name, {}).update(values)
    for name, values in mine.kept.items():
        joined.kept[name].update(values)
    return joined
