"""Optimizer states of wrapped models on their way in: to what each rank's optimizer loads, and from name to number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor

from engine.reference.flat import FlatPiece
from engine.reference.optimizer_state import NamedState, Owned, ParameterState, all_owned, copied
from engine.reference.original_names import clean_name

__all__ = ["broadcast_from_first", "loadable", "rekeyed"]


def loadable(
    model: nn.Module, optimizer: torch.optim.Optimizer, named: NamedState, *, is_local: bool, by_name: bool
) -> NamedState:
    """Turn a named state of whole or sharded tensors (``is_local``: of local ones) into one for the optimizer.

    Its parameters are numbered, or named with ``by_name``. Collective where tensors are sharded. Raises ValueError
    for a state that lacks a parameter's group.
    """
    by_parameter = {owned.parameter: owned for owned in all_owned(model)}
    state: dict[Any, Any] = {}
    groups = []
    count = 0
    for group in optimizer.param_groups:
        keys: list[Any] = []
        names = []
        for parameter in group["params"]:
            owned = by_parameter[parameter]
            names += [name for name, _ in owned.pieces]
            key = owned.pieces[0][0] if by_name else count
            keys.append(key)
            count += 1
            made = _state_of(owned, named["state"], is_local=is_local)
            if made:
                state[key] = made
        saved = _group_of(names, named["param_groups"])
        groups.append({**{k: v for k, v in saved.items() if k != "params"}, "params": keys})
    return {"state": state, "param_groups": groups}


def broadcast_from_first(named: NamedState | None, group: dist.ProcessGroup | None) -> NamedState:
    """Give every rank of ``group`` what its first rank has."""
    box: list[Any] = [named]
    first = 0 if group is None else dist.get_process_group_ranks(group)[0]
    dist.broadcast_object_list(box, src=first, group=group)
    received: NamedState = box[0]
    return received


def rekeyed(
    states: Mapping[str, Any],
    key_type: OptimStateKeyType,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Number the parameters of a state, or name them; see `rekey_optim_state_dict` of the wrapper.

    Raises ValueError for a type of keys that is neither, or a parameter that the state does not have.
    """
    if key_type not in {OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID}:
        raise ValueError(f"optim_state_key_type: expected PARAM_NAME or PARAM_ID, got {key_type!r}")
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    given = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    ordered = [names[parameter] for parameter in given or model.parameters()]
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
        "param_groups": [
            {**group, "params": [new_key(key) for key in group["params"]]} for group in states["param_groups"]
        ],
    }


def _state_of(owned: Owned, named: Mapping[str, ParameterState], *, is_local: bool) -> dict[str, Any]:
    """Make the state of one of the optimizer's parameters from those of the original ones."""
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
    return value.shape == piece.shape and (value.dim() > 0 or not piece.shape)


def _local_part(value: torch.Tensor, piece: FlatPiece, *, is_local: bool) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    flat = whole.reshape(-1)
    return flat if is_local else flat[piece.first : piece.first + piece.local_numel]


def _group_of(names: list[str], groups: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    wanted = set(names)
    for group in groups:
        if wanted & set(group["params"]) or not names:
            return group
    raise ValueError(
        f"optimizer state to load: expected a parameter group with {names[:3]}, got none of them; "
        "load what was saved of a model with the same parameters"
    )
