"""Optimizer states of wrapped models: maps them to original parameters, saves and loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from shardproof.engine.reference.fsdp1.flat import FlatPiece
from shardproof.engine.reference.fsdp1.full_params import clean_name, gathered, layout_of
from shardproof.engine.reference.fsdp1.state_dict import named_pieces, sharded_over
from shardproof.engine.reference.param_group import FSDPParamGroup

# Any: optimizers store values of any type.
NamedState = dict[str, Any]
"""``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}]}``, by original names.

A value with the size of its parameter has the parameter's form; all others, such as step counts, are unchanged.
"""
ParameterState = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Owned:
    """One parameter of the optimizer: the original parameters in it, and their group if it has one."""

    parameter: nn.Parameter
    pieces: tuple[tuple[str, FlatPiece | None], ...]
    group: FSDPParamGroup | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A state dict of an optimizer with parameters in place of their indices."""

    state: Mapping[nn.Parameter, ParameterState]
    groups: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> Snapshot:
        """Replace indices by the optimizer's parameters, or names, which may be in an order of their own."""
        groups = tuple(
            {**saved, "params": list(own["params"])}
            for saved, own in zip(states["param_groups"], optimizer.param_groups, strict=True)
        )
        numbers = [number for saved in states["param_groups"] for number in saved["params"]]
        parameters = [parameter for group in groups for parameter in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=True))
        if any(isinstance(number, str) for number in numbers):
            by_number = {form: p for name, p in model.named_parameters() for form in (name, clean_name(name))}
        return cls(
            state={by_number[number]: found for number, found in states["state"].items()}, groups=groups
        )


def all_owned(model: nn.Module) -> Iterator[Owned]:
    """Yield every parameter of ``model`` that an optimizer may have, wrapped ones in the order of wrappers."""
    by_owner: dict[nn.Parameter, list[tuple[str, FlatPiece | None]]] = {}
    groups: dict[nn.Parameter, FSDPParamGroup] = {}
    for name, group, piece in named_pieces(model):
        by_owner.setdefault(piece.sharded_param, []).append((name, piece))
        groups[piece.sharded_param] = group
    for parameter, pieces in by_owner.items():
        yield Owned(parameter=parameter, pieces=tuple(pieces), group=groups[parameter])
    for name, parameter in model.named_parameters():
        if parameter not in by_owner:
            yield Owned(parameter=parameter, pieces=((clean_name(name), None),), group=None)


def named_groups(model: nn.Module, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the parameter groups with original names in place of parameters."""
    names = {owned.parameter: [name for name, _ in owned.pieces] for owned in all_owned(model)}
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [name for parameter in group["params"] for name in names[parameter]],
        }
        for group in snapshot.groups
    ]


def copied(value: Any) -> Any:
    """Copy all tensors, so that no two names of one flat parameter share one: a step would count twice."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def is_like(value: object, parameter: nn.Parameter) -> bool:
    """Whether a state has one element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def part_of(value: Any, owned: Owned, piece: FlatPiece | None) -> Any:
    """Return a piece's part of a state of its owner, if the state has one element for each of the owner's."""
    if piece is None or piece.is_visible or not is_like(value, owned.parameter):
        return value
    return value[piece.offset : piece.offset + piece.local_numel]


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any], *, offloads: bool
) -> NamedState:
    """Gather the whole of ``states``, a state dict of ``optimizer``, on every rank. Collective over shard groups."""

    def export(whole: torch.Tensor, _: FSDPParamGroup) -> torch.Tensor:
        return whole.cpu() if offloads else whole.clone()

    return _exported(model, Snapshot.of(model, optimizer, states), export)


def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any], *, offloads: bool
) -> NamedState:
    """Gather, and keep of each tensor the share of dim 0 that this rank is to save, as a DTensor. Collective."""

    def export(whole: torch.Tensor, group: FSDPParamGroup) -> torch.Tensor:
        if group.mesh.shard_group is None:
            return whole.clone()
        spread = sharded_over(whole, group)
        return spread.cpu() if offloads else spread

    return _exported(model, Snapshot.of(model, optimizer, states), export)


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> NamedState:
    """Return each rank's own values: 1-D parts that fit only the same wrapping on the same ranks."""
    snapshot = Snapshot.of(model, optimizer, states)
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
    export: Callable[[torch.Tensor, FSDPParamGroup], torch.Tensor],
) -> NamedState:
    state: dict[str, Any] = {}
    loose = []
    by_group: dict[FSDPParamGroup, list[Owned]] = {}
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
    """A gathered tensor, as opposed to values that are returned unchanged."""

    tensor: torch.Tensor


def _gathered_states(
    group: FSDPParamGroup, members: Iterable[Owned], snapshot: Snapshot
) -> dict[str, dict[str, Any]]:
    """Gather the states of one group's parameters, those of one key together, like the parameters."""
    states = {owned.parameter: snapshot.state.get(owned.parameter, {}) for owned in members}
    flat = layout_of(group)
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
                made.setdefault(name, {})[key] = _Gathered(piece.laid_out(view))
    for name, values in described.kept.items():
        made.setdefault(name, {}).update(values)
    return made


@dataclass(slots=True, kw_only=True)
class _Description:
    """A description of states: the dtype of each gathered key, values that are not gathered, and names with a state."""

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


def _agreed(group: FSDPParamGroup, mine: _Description) -> _Description:
    """Join the descriptions of a group's ranks: a rank without an element of a parameter may lack its state."""
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


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, optim_input: Iterable[Any] | None
) -> Sequence[Mapping[str, Any]]:
    """Return the groups of an optimizer, or of one to be made of ``optim_input``, by default all parameters."""
    if optimizer is not None:
        return optimizer.param_groups
    given = list(model.parameters() if optim_input is None else optim_input)
    return given if given and isinstance(given[0], dict) else [{"params": given}]


def loadable(
    model: nn.Module,
    own_groups: Sequence[Mapping[str, Any]],
    named: NamedState,
    *,
    is_local: bool,
    by_name: bool,
) -> NamedState:
    """Convert a named state of whole or sharded tensors (``is_local``: of local ones) into one for an optimizer.

    Its parameters are indices, or with ``by_name`` names in the wrapped model, as an optimizer of names has them.
    Collective if tensors are sharded. Raises ValueError for a state that lacks a parameter's group.
    """
    by_parameter = {owned.parameter: owned for owned in all_owned(model)}
    wrapped_names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[Any, Any] = {}
    groups = []
    count = 0
    for group in own_groups:
        keys: list[Any] = []
        names = []
        for parameter in group["params"]:
            owned = by_parameter[parameter]
            names += [name for name, _ in owned.pieces]
            key = wrapped_names[parameter] if by_name else count
            keys.append(key)
            count += 1
            made = _state_of(owned, named["state"], is_local=is_local)
            if made:
                state[key] = made
        saved = _group_of(names, named["param_groups"])
        groups.append({**{k: v for k, v in saved.items() if k != "params"}, "params": keys})
    return {"state": state, "param_groups": groups}


def broadcast_from_first(named: NamedState | None, group: dist.ProcessGroup | None) -> NamedState:
    """Return the first rank's value on every rank of ``group``."""
    box: list[Any] = [named]
    first = 0 if group is None else dist.get_process_group_ranks(group)[0]
    dist.broadcast_object_list(box, src=first, group=group)
    received: NamedState = box[0]
    return received


def rekeyed(
    states: Mapping[str, Any],
    key_type: OptimStateKeyType,
    model: nn.Module,
    own_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Use indices or names for the parameters of a state; see `rekey_optim_state_dict` of the wrapper.

    Raises ValueError for another type of keys, or for a parameter that the state does not have.
    """
    if key_type not in {OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID}:
        raise ValueError(f"optim_state_key_type: expected PARAM_NAME or PARAM_ID, got {key_type!r}")
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in own_groups for parameter in group["params"]]
    is_named = key_type is OptimStateKeyType.PARAM_NAME
    new_keys: dict[Any, Any] = dict(enumerate(ordered)) if is_named else {n: i for i, n in enumerate(ordered)}

    kept = str if is_named else int

    def new_key(key: Any) -> Any:
        if isinstance(key, kept):
            return key
        if key not in new_keys:
            raise ValueError(
                f"optim_state_dict: expected keys of {len(ordered)} parameters of the model, got {key!r}"
            )
        return new_keys[key]

    return {
        "state": {new_key(key): value for key, value in states["state"].items()},
        # Optimizers load by position, so indices are in their order.
        "param_groups": [
            {**group, "params": sorted(new_key(key) for key in group["params"])}
            for group in states["param_groups"]
        ],
    }


def _state_of(owned: Owned, named: Mapping[str, ParameterState], *, is_local: bool) -> dict[str, Any]:
    """Build the state of one of the optimizer's parameters from those of the original ones."""
    parts: dict[str, list[tuple[FlatPiece | None, Any]]] = {}
    for name, piece in owned.pieces:
        for key, value in named.get(name, {}).items():
            parts.setdefault(key, []).append((piece, value))
    return {key: _joined(owned, values, is_local=is_local) for key, values in parts.items()}


def _joined(owned: Owned, values: list[tuple[FlatPiece | None, Any]], *, is_local: bool) -> Any:
    piece, value = values[0]
    if (
        not isinstance(value, torch.Tensor)
        or piece is None
        or not _has_shape(value, piece, is_local=is_local)
    ):
        return copied(value)
    home, dtype = owned.parameter.device, value.dtype
    if piece.is_visible:
        part = _local_part(value, piece, is_local=is_local)
        return part.to(home, copy=True).view(owned.parameter.shape)
    share = torch.zeros(owned.parameter.shape, dtype=dtype, device=home)
    for each, whole in values:
        assert each is not None
        share[each.offset : each.offset + each.local_numel].copy_(_local_part(whole, each, is_local=is_local))
    return share


def _has_shape(value: torch.Tensor, piece: FlatPiece, *, is_local: bool) -> bool:
    if is_local:
        return value.numel() == piece.local_numel and value.dim() > 0
    return value.shape == piece.global_shape and (value.dim() > 0 or not piece.shape)


def _local_part(value: torch.Tensor, piece: FlatPiece, *, is_local: bool) -> torch.Tensor:
    if is_local:
        return value.reshape(-1)
    return piece.own_part(value).reshape(-1)[piece.first : piece.first + piece.local_numel]


def _group_of(names: list[str], groups: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    wanted = set(names)
    for group in groups:
        if wanted & set(group["params"]) or not names:
            return group
    raise ValueError(
        f"optimizer state to load: expected a parameter group with {names[:3]}, got none of them; "
        "load what was saved of a model with the same parameters"
    )
