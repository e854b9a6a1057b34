"""One JSON line of a run: how a dataclass is written to it, and read back with every field checked.

[Note: what a line looks like]
A line is one JSON object whose keys are the fields of the dataclass, nested values included, and ``kind``
where lines of several kinds share a file. JSON knows no NaN and no infinity, and parsers disagree about the
literals that Python would write, so a float that is not finite travels as one of the strings "nan", "inf",
"-inf". A line at the newest schema must have every field; in a line of an older schema a field that has a
default may be absent.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from shardproof.harness.errors import NewerSchemaError, UsageError

T = TypeVar("T")

_UNFINITE: Mapping[str, float] = MappingProxyType({"nan": math.nan, "inf": math.inf, "-inf": -math.inf})


def write(line: object, *, kind: str | None) -> str:
    """Return the line of a dataclass; see [Note: what a line looks like]."""
    plain = ({} if kind is None else {"kind": kind}) | _encode(line)
    return json.dumps(plain, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def read(type_: type[T], text: str, *, where: str, newest: int, kind: str | None) -> T:
    """Read and check one line; a UsageError that quotes ``where`` (file:line) says what is wrong with it.

    ``newest`` is the highest schema that can be read.
    """
    at = _Place(where=where, field="", schema=newest, newest=newest)
    plain = _parse(text, at)
    if not isinstance(plain, dict):
        raise at.refusal(expected=f"a JSON object with the fields of a {type_.__name__}", value=plain)
    at = replace(at, schema=_schema_of(plain, at))
    if kind is not None and (found := plain.pop("kind", None)) != kind:
        raise at.inside("kind").refusal(expected=repr(kind), value=found)
    line: T = _decode_fields(type_, plain, at)
    return line


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Which field of which line is being read, the schema it says it has, and the newest there is."""

    where: str
    field: str
    schema: int
    newest: int

    def inside(self, name: str) -> _Place:
        """Step into a field or, with ``[i]``, an item."""
        dot = "." if self.field and not name.startswith("[") else ""
        return replace(self, field=f"{self.field}{dot}{name}")

    def refusal(self, *, expected: str, value: object, hint: str = "") -> UsageError:
        """Return what is wrong here; ``value`` is what came."""
        return self.complaint(expected=expected, got=_quote(value), hint=hint)

    def complaint(self, *, expected: str, got: str, hint: str = "") -> UsageError:
        """Return what is wrong here in words."""
        return UsageError(
            f"{self.where}: {self.field or 'line'}",
            expected=expected,
            got=got,
            hint=hint or "running again, or restoring the file: lines are not meant to be edited",
        )


# Any, from here on: JSON before it is checked, and type hints as values, have no narrower type.
def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def _parse(text: str, at: _Place) -> Any:
    def refuse_literal(literal: str) -> Any:
        raise at.complaint(
            expected="strict JSON", got=literal, hint=f"the string {literal.lower().replace('inity', '')!r}"
        )

    def refuse_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        plain = dict(pairs)
        if len(plain) < len(pairs):
            raise at.complaint(expected="each field once", got=f"repeated fields among {sorted(plain)}")
        return plain

    try:
        return json.loads(text, parse_constant=refuse_literal, object_pairs_hook=refuse_repetition)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an integer of absurd length
        raise at.complaint(expected="one JSON object", got=f"{_quote(text)} ({error})") from error


def _schema_of(plain: dict[str, Any], at: _Place) -> int:
    at = at.inside("schema")
    schema = plain.get("schema")
    if type(schema) is not int or schema < 1:
        raise at.refusal(expected=f"a version from 1 to {at.newest}", value=schema)
    if schema > at.newest:
        raise NewerSchemaError(
            f"{at.where}: {at.field}",
            expected=f"at most {at.newest}",
            got=_quote(schema),
            hint="the newer shardproof that wrote this run",
        )
    return schema


def _decode_fields(kind: type, plain: Any, at: _Place) -> Any:
    if not isinstance(plain, dict):
        raise at.refusal(expected=f"an object with the fields of a {kind.__name__}", value=plain)
    hints = _hints(kind)
    if at.schema < at.newest:
        plain = _renamed(kind, plain)
    for name in sorted(plain.keys() - hints.keys()):
        raise at.inside(name).complaint(
            expected=f"a field of {kind.__name__}", got="an unknown one", hint=_nearest(name, hints)
        )
    absent = [f.name for f in fields(kind) if f.name not in plain and not _may_be_absent(f, at)]
    if absent:
        raise at.complaint(expected=f"the field {absent[0]!r}", got=f"a {kind.__name__} without it")
    return kind(**{name: _decode(hints[name], value, at.inside(name)) for name, value in plain.items()})


def _renamed(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an older schema under the names of today."""
    names = {f.metadata["formerly"]: f.name for f in fields(kind) if "formerly" in f.metadata}
    return {names.get(name, name): value for name, value in plain.items()}


def _may_be_absent(of: Field[Any], at: _Place) -> bool:
    has_default = of.default is not MISSING or of.default_factory is not MISSING
    return has_default and at.schema < at.newest


def _decode(hint: Any, value: Any, at: _Place) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {UnionType, Union}:  # the only union in the schema is with None
        return None if value is None else _decode(arguments[0], value, at)
    if origin is tuple:
        if not isinstance(value, list):
            raise at.refusal(expected="a list", value=value)
        return tuple(_decode(arguments[0], item, at.inside(f"[{i}]")) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise at.refusal(expected="an object", value=value)
        return {key: _decode(arguments[1], item, at.inside(key)) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return _decode_fields(hint, value, at)
    return _decode_plain(hint, value, at)


def _decode_plain(hint: Any, value: Any, at: _Place) -> Any:
    if issubclass(hint, Enum):
        members = [str(member.value) for member in hint]
        if value not in members:
            raise at.refusal(
                expected=f"a {hint.__name__} ({', '.join(members)})",
                value=value,
                hint=_nearest(value, members),
            )
        return hint(value)
    if hint is float:
        return _decode_float(value, at)
    if type(value) is not hint:  # exactly: True is an int to isinstance
        raise at.refusal(expected=_NAMES[hint], value=value)
    return value


def _decode_float(value: Any, at: _Place) -> float:
    if isinstance(value, str) and value in _UNFINITE:
        return _UNFINITE[value]
    # Other writers may drop the fraction of 1.0. The bound refuses 1e999 and integers that no float can hold.
    if type(value) in {int, float} and abs(value) <= sys.float_info.max:
        return float(value)
    raise at.refusal(expected=f"a number or one of {sorted(_UNFINITE)}", value=value)


_NAMES: Mapping[type, str] = MappingProxyType({str: "a string", int: "an integer", bool: "true or false"})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _nearest(word: object, known: Any) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return near[0] if near else f"one of {', '.join(sorted(known))}"


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}... ({len(text)} characters)"
