"""Tensors inside what a forward takes and gives: sequences, mappings, dataclasses, nested as they come."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_in"]

# Any: a module may take and return whatever it likes.


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Give every tensor inside ``value``, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Give ``value`` with every tensor changed, in the order of ``tensors_in``; containers are rebuilt."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _rebuilt_mapping(change, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, list | tuple):
        items = [map_tensors(change, item) for item in value]
        return items if type(value) is list else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rebuilt_dataclass(change, value)
    return value


def _rebuilt_mapping(change: Callable[[torch.Tensor], torch.Tensor], value: Mapping[Any, Any]) -> Any:
    items = {key: map_tensors(change, item) for key, item in value.items()}
    if type(value) is dict:
        return items
    rebuilt: Any = copy.copy(value)  # keeps what a subclass holds besides its items
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def _rebuilt_dataclass(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    rebuilt = copy.copy(value)
    for field in dataclasses.fields(value):
        # Not dataclasses.replace: it refuses fields that __init__ does not take; frozen ones refuse setattr.
        object.__setattr__(rebuilt, field.name, map_tensors(change, getattr(value, field.name)))
    return rebuilt
