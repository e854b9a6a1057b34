"""Tensors inside what a forward takes and gives: sequences, mappings, dataclasses, nested as they come."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Give ``value`` with every tensor changed, in the order of ``tensors_in``.

    A container in which nothing changes is given back itself, so that a module may write to it for its caller.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(change, item) for key, item in value.items()}
        return value if _same(items.values(), value.values()) else _mapping_like(value, items)
    if isinstance(value, list | tuple):
        parts = [map_tensors(change, item) for item in value]
        return value if _same(parts, value) else _sequence_like(value, parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: map_tensors(change, getattr(value, name)) for name in names}
        is_same = _same(fields.values(), [getattr(value, name) for name in names])
        return value if is_same else _dataclass_like(value, fields)
    return value


def _same(changed: Iterable[Any], given: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(changed, given, strict=True))


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    rebuilt: Any = copy.copy(value)  # keeps what a subclass holds besides its items
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def _sequence_like(value: Any, parts: list[Any]) -> Any:
    if type(value) is list:
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _dataclass_like(value: Any, fields: dict[str, Any]) -> Any:
    rebuilt = copy.copy(value)
    for name, field in fields.items():
        # Not dataclasses.replace: it refuses fields that __init__ does not take; frozen ones refuse setattr.
        object.__setattr__(rebuilt, name, field)
    return rebuilt
