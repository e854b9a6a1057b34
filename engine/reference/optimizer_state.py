"""Whose optimizer state is whose: from an optimizer's parameters to the original ones that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.reference.flat import FlatPiece
from engine.reference.group import Group
from engine.reference.original_names import clean_name
from engine.reference.wrapper_state import named_pieces

__all__ = [
    "NamedState",
    "Owned",
    "ParameterState",
    "Snapshot",
    "all_owned",
    "copied",
    "is_like",
    "named_groups",
    "part_of",
]

# Any: optimizers keep what they like.
NamedState = dict[str, Any]
"""``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}]}``, by original names.

A value that is as large as its parameter follows the parameter's form; all others, such as step counts, are kept as
they are.
"""
ParameterState = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Owned:
    """One parameter of the optimizer: the original parameters that it stands for, and their group if it has one."""

    parameter: nn.Parameter
    pieces: tuple[tuple[str, FlatPiece | None], ...]
    group: Group | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A state dict of an optimizer with the parameters in the place of their numbers."""

    state: Mapping[nn.Parameter, ParameterState]
    groups: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> Snapshot:
        """Put the optimizer's parameters in."""
        groups = tuple(
            {**saved, "params": list(own["params"])}
            for saved, own in zip(states["param_groups"], optimizer.param_groups, strict=True)
        )
        numbers = [number for saved in states["param_groups"] for number in saved["params"]]
        parameters = [parameter for group in groups for parameter in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=True))
        return cls(
            state={by_number[number]: found for number, found in states["state"].items()}, groups=groups
        )


def all_owned(model: nn.Module) -> Iterator[Owned]:
    """Give every parameter of ``model`` that an optimizer may have, wrapped ones in the order of wrappers."""
    by_owner: dict[nn.Parameter, list[tuple[str, FlatPiece | None]]] = {}
    groups: dict[nn.Parameter, Group] = {}
    for name, group, piece in named_pieces(model):
        by_owner.setdefault(piece.owned, []).append((name, piece))
        groups[piece.owned] = group
    for parameter, pieces in by_owner.items():
        yield Owned(parameter=parameter, pieces=tuple(pieces), group=groups[parameter])
    for name, parameter in model.named_parameters():
        if parameter not in by_owner:
            yield Owned(parameter=parameter, pieces=((clean_name(name), None),), group=None)


def named_groups(model: nn.Module, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Give the parameter groups with original names in the place of parameters."""
    names = {owned.parameter: [name for name, _ in owned.pieces] for owned in all_owned(model)}
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [name for parameter in group["params"] for name in names[parameter]],
        }
        for group in snapshot.groups
    ]


def copied(value: Any) -> Any:
    """Share no tensor with the optimizer, nor between the names of one flat parameter: a step would count twice."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def is_like(value: object, parameter: nn.Parameter) -> bool:
    """Whether a state has one element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def part_of(value: Any, owned: Owned, piece: FlatPiece | None) -> Any:
    """Give a piece's part of a state of its owner, if there is one element for each of the owner's."""
    if piece is None or piece.is_visible or not is_like(value, owned.parameter):
        return value
    return value[piece.offset : piece.offset + piece.local_numel]
