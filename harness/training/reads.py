"""Reads a prepared model: plain copies of a checked form, and errors that name the read."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, SupportsFloat, TypeVar

import torch

from shardproof.engine.contract import PreparedModel, Shard
from shardproof.harness.errors import EngineError
from shardproof.harness.torch_compat.dtypes import dense
from shardproof.harness.worlds.exception_outcome import IN

_E = TypeVar("_E", bound=Enum)
_SHARDS = "a mapping from names to shards"


@contextmanager
def calling(method: str) -> Iterator[None]:
    """Note on any exception raised inside which method of the prepared model raised it."""
    try:
        yield
    except EngineError:  # which names the method itself
        raise
    except BaseException as error:
        with suppress(Exception):  # an engine's error may refuse notes
            BaseException.add_note(error, f"{IN}{method}()")
        raise


def read_shards(prepared: PreparedModel, method: str) -> dict[str, Shard]:
    """Call a read and copy its results; raises EngineError if it returns anything but shards."""
    shards = _read(prepared, method)
    for name, shard in shards.items():
        if shard is None:
            raise _fault(method, name, expected="a Shard", got=None)
    return {name: shard for name, shard in shards.items() if shard is not None}


def read_gradients(prepared: PreparedModel) -> dict[str, Shard | None]:
    """Call ``local_gradients`` and copy the results; None where the engine has no gradient."""
    return _read(prepared, "local_gradients")


def read_presence(prepared: PreparedModel, method: str) -> dict[str, bool]:
    """Call a read, and return of which names the engine has a value, and of which elements; nothing is copied.

    A number is no element: the step count of a parameter may be where none of its elements is.
    """
    with calling(method):
        found = _called(prepared, method).items()
        return {_name(method, name): _has_rows(shard) for name, shard in found if shard is not None}


def _has_rows(shard: object) -> bool:
    return isinstance(shard, Shard) and bool(shard.global_shape) and shard.tensor.numel() > 0


def read_norm(prepared: PreparedModel, max_norm: float, norm_type: float) -> float:
    """Clip through the engine, and return the norm that it returns."""
    with calling("clip_grad_norm_"):
        norm: object = prepared.clip_grad_norm_(max_norm, norm_type)
        if not isinstance(norm, SupportsFloat):
            raise _fault("clip_grad_norm_", None, expected="a float", got=norm)
        return float(norm)


def read_declared(prepared: PreparedModel, name: str, kind: type[_E]) -> _E:
    """Read an attribute in which the adapter declares a property; raises EngineError for anything but a ``kind``."""
    value: object = getattr(prepared, name)
    if not isinstance(value, kind):
        first = f"{kind.__name__}.{next(iter(kind)).name}"
        raise EngineError(
            f"PreparedModel.{name}", expected=f"a {kind.__name__}", got=_form(value), hint=first
        )
    return value


def _read(prepared: PreparedModel, method: str) -> dict[str, Shard | None]:
    with calling(method):
        found = _called(prepared, method)
        # The mapping may be the engine's own class, and iterating over it may raise too.
        return {_name(method, name): _copied(method, name, shard) for name, shard in found.items()}


# Any, from here on: values before they are checked.
def _called(prepared: PreparedModel, method: str) -> Mapping[Any, Any]:
    found: object = getattr(prepared, method)()
    if not isinstance(found, Mapping):
        raise _fault(method, None, expected=_SHARDS, got=found)
    return found


def _name(method: str, name: Any) -> str:
    if not isinstance(name, str):
        raise _fault(method, None, expected=f"{_SHARDS}, names being texts", got=name)
    return str.__str__(name)


def _copied(method: str, name: str, shard: Any) -> Shard | None:
    """Copy a value as a plain tensor on the CPU, so that later changes by the adapter do not show."""
    if shard is None:
        return None
    if not isinstance(shard, Shard):
        raise _fault(method, name, expected="a Shard", got=shard)
    if type(shard.tensor) not in {torch.Tensor, torch.nn.Parameter}:
        raise _fault(method, name, expected="a Shard of a plain tensor", got=shard.tensor)
    return Shard(
        tensor=dense(shard.tensor.detach().to("cpu", copy=True)),
        offsets=_integers(method, name, "offsets", shard.offsets),
        global_shape=_integers(method, name, "global_shape", shard.global_shape),
        is_flat=bool(shard.is_flat),
    )


def _integers(method: str, name: str, part: str, values: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise _fault(method, name, expected=f"{part} that are integers", got=values) from None


def _fault(method: str, name: str | None, *, expected: str, got: object) -> EngineError:
    where = f" of {name!r}" if name is not None else ""
    return EngineError(
        f"PreparedModel.{method}(){where}",
        expected=expected,
        got=_form(got),
        hint="shard_of, which describes plain tensors and DTensors"
        if expected != "a float"
        else "float(norm)",
    )


def _form(value: object) -> str:
    """Format a value by its type; a small plain value as it is."""
    if value is None or type(value) in {bool, int, float}:
        return repr(value)
    if type(value) is tuple and len(value) < 8 and all(type(item) in {int, float} for item in value):
        return repr(value)
    return f"a value of type {type(value).__name__}"
