"""The JSON codec: encodes dataclasses as JSON values and text, and decodes them with every field checked.

[Note: what a line looks like]
A line of a run is one JSON object. Its keys are the fields of the dataclass, nested values included, and ``kind`` where
lines of several kinds share a file. JSON has no NaN and no infinity, and parsers disagree about the literals that
Python would write, so a float that is not finite is written as one of the strings "nan", "inf", "-inf". A line at the
newest schema must have every field. In a line of an older schema a field that has a default may be absent.

[Note: why no library] The input may come from an engine, or from a damaged file. It may contain half a surrogate pair,
a repeated field or an unknown one. The codec must refuse it and report the field, the expected type and the value
found. msgspec 0.22 cannot read or write such text, keeps the last of repeated fields, ignores unknown fields of
dataclasses, writes NaN as null, does not support unions of dataclasses, and quotes no values.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache, lru_cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from shardproof.harness.errors import NewerSchemaError, UsageError

T = TypeVar("T")
# Any, throughout: JSON before it is checked, and type hints as values, have no narrower type.
_Reader = Callable[[Any], Any]

_UNFINITE: Mapping[str, float] = MappingProxyType({"nan": math.nan, "inf": math.inf, "-inf": -math.inf})
_NAMES: Mapping[type, str] = MappingProxyType({str: "a string", int: "an integer", bool: "true or false"})
_KIND = ""  # the key for the dataclass's name where several are possible, or for a type JSON lacks
ROW: Mapping[str, bool] = MappingProxyType({"is_row": True})
"""Metadata of a field of ranks, of which many are written as a row: its first, its end and its step."""
_LONGEST_LIST, _LONGEST_ROW = 64, 2**20
_LINE = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What reading JSON raises, and reading values of ours from it, where it holds none."""


class MismatchError(ValueError):
    """A value that does not match its type; ``path`` leads to it."""

    def __init__(self, expected: str, got: str, hint: str = "") -> None:
        super().__init__(expected, got, hint)
        self.path, self.expected, self.got, self.hint = "", expected, got, hint

    def inside(self, step: str) -> MismatchError:
        """Prepend a field or, as ``[i]``, an item to the path."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"{step}{dot}{self.path}"
        return self

    def __str__(self) -> str:
        return f"{self.path or 'value'}: expected {self.expected}, got {self.got}"


def encode(value: Any, rows: frozenset[type] = frozenset()) -> Any:
    """Return a value in JSON's own types, dataclasses of ``rows`` as lists of their fields' values.

    Other objects stay as they are, for encoders that support more types than JSON.
    """
    # First because it is the most frequent case; includes string enums.
    if isinstance(value, str | int) or value is None:
        return value
    kind: type = type(value)
    if is_dataclass(kind):
        parts = {name: how(getattr(value, name), rows) for name, how in _writers(kind).items()}
        return list(parts.values()) if kind in rows else parts
    if isinstance(value, tuple | list):
        return [encode(item, rows) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: encode(item, rows) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, frozenset):
        return sorted(encode(item, rows) for item in value)
    return value


def encode_one_of(value: Any, rows: frozenset[type] = frozenset()) -> dict[str, Any] | None:
    """Return a dataclass with its name, where several dataclasses are possible; None stays None."""
    return None if value is None else {_KIND: type(value).__name__, **encode(value, rows)}


@overload
def decode(type_: type[T], plain: Any, *, is_older: bool = True) -> T: ...
@overload
def decode(type_: UnionType, plain: Any, *, is_older: bool = True) -> Any: ...
def decode(type_: Any, plain: Any, *, is_older: bool = True) -> Any:
    """Decode the result of `encode`, rows included; raises MismatchError.

    Fields with defaults may be absent if ``is_older``.
    """
    return _reader(type_, is_older)(plain)


def write(line: object, *, kind: str | None) -> str:
    """Return the line of a dataclass; see [Note: what a line looks like]."""
    return _LINE.encode(({} if kind is None else {"kind": kind}) | encode(line))


def read(type_: type[T], text: str, *, where: str, newest: int, kind: str | None) -> T:
    """Read and check one line; raises a UsageError that quotes ``where`` (file:line) and describes the mismatch.

    ``newest`` is the highest schema that can be read.
    """
    try:
        plain = _parse(text)
        if not isinstance(plain, dict):
            raise MismatchError(f"a JSON object with the fields of a {type_.__name__}", _quote(plain))
        schema = plain.get("schema")
        if type(schema) is not int or schema < 1:
            raise MismatchError(f"a version from 1 to {newest}", _quote(schema)).inside("schema")
        if schema > newest:
            raise NewerSchemaError(
                f"{where}: schema",
                expected=f"at most {newest}",
                got=_quote(schema),
                hint="the newer shardproof that wrote this run",
            )
        if kind is not None and (found := plain.pop("kind", None)) != kind:
            raise MismatchError(repr(kind), _quote(found)).inside("kind")
        return decode(type_, plain, is_older=schema < newest)
    except MismatchError as error:
        raise UsageError(
            f"{where}: {error.path or 'line'}",
            expected=error.expected,
            got=error.got,
            hint=error.hint or "running again, or restoring the file: lines are not meant to be edited",
        ) from error


def _parse(text: str) -> Any:
    def refuse_literal(literal: str) -> Any:
        hint = f"the string {literal.lower().replace('inity', '')!r}"
        raise MismatchError("strict JSON", literal, hint)

    def refuse_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        plain = dict(pairs)
        if len(plain) < len(pairs):
            raise MismatchError("each field once", f"repeated fields among {sorted(plain)}")
        return plain

    try:
        return json.loads(text, parse_constant=refuse_literal, object_pairs_hook=refuse_repetition)
    except MismatchError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an integer of absurd length
        raise MismatchError("one JSON object", f"{_quote(text)} ({error})") from error


@cache
def _writers(kind: type) -> Mapping[str, Callable[[Any, frozenset[type]], Any]]:
    """Return the encoder of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {
        f.name: _encode_any
        if hints[f.name] is Any
        else encode_row
        if "is_row" in f.metadata
        else encode_one_of
        if len(_dataclasses_of(hints[f.name])) > 1
        else encode
        for f in fields(kind)
    }


def encode_row(value: tuple[int, ...], rows: frozenset[type] = frozenset()) -> Any:
    """Return a field of ranks in JSON's own types; see `ROW`."""
    return list(value) if len(value) <= _LONGEST_LIST else _row_of(value)


@lru_cache(maxsize=64)  # a journal has one per call
def _row_of(ranks: tuple[int, ...]) -> Any:
    row = range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]))
    return {"first": row.start, "end": row.stop, "step": row.step} if ranks == tuple(row) else list(ranks)


def _row_reader(read_items: _Reader) -> _Reader:
    read_bounds = _mapping_reader(_plain_reader(int))

    def read_row(value: Any) -> Any:
        if not isinstance(value, dict):
            return read_items(value)
        bounds = read_bounds(value)
        if bounds.keys() != {"first", "end", "step"} or bounds["step"] < 1:
            raise MismatchError("first, end and step of a row", _quote(value))
        return _row(bounds["first"], bounds["end"], bounds["step"])

    return read_row


@lru_cache(maxsize=64)
def _row(first: int, end: int, step: int) -> tuple[int, ...]:
    if (end - first) // step > _LONGEST_ROW:
        raise MismatchError(f"at most {_LONGEST_ROW} ranks", f"a row from {first} to {end}")
    return tuple(range(first, end, step))


def _encode_any(value: Any, rows: frozenset[type]) -> Any:
    """Encode a plain value of any type so that it decodes to an equal value."""
    if isinstance(value, dict):
        items = [[_encode_any(key, rows), _encode_any(item, rows)] for key, item in value.items()]
        return {_KIND: "dict", "items": items}
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [_encode_any(item, rows) for item in value]}
    if isinstance(value, list):
        return [_encode_any(item, rows) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"expected plain values, got {type(value).__name__}")


def _decode_any(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_any(item) for item in value]
    if not isinstance(value, dict):
        return value
    items, kind = value.get("items"), value.get(_KIND)
    if isinstance(items, list) and kind == "tuple":
        return tuple(map(_decode_any, items))
    if isinstance(items, list) and kind == "dict":
        return {_decode_any(key): _decode_any(item) for key, item in items}
    raise MismatchError("a plain value", _quote(value))


@cache
def _reader(hint: Any, is_older: bool) -> _Reader:
    """Return the reader for a type; created once per type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return _decode_any
    if origin in {UnionType, Union}:
        return _union_reader(hint, is_older)
    if origin in {tuple, frozenset}:
        return _items_reader(origin, _reader(arguments[0], is_older))
    if origin in {dict, Mapping} or origin is get_origin(Mapping[str, str]):
        return _mapping_reader(_reader(arguments[1], is_older))
    if is_dataclass(hint):
        return _fields_reader(hint, is_older)
    if issubclass(hint, Enum):
        return _member_reader(hint)
    return _float if hint is float else _plain_reader(hint)


def _dataclasses_of(hint: Any) -> Mapping[str, type]:
    parts = get_args(hint) if get_origin(hint) in {UnionType, Union} else ()
    return {part.__name__: part for part in parts if isinstance(part, type) and is_dataclass(part)}


def _union_reader(hint: Any, is_older: bool) -> _Reader:
    """Read one of several dataclasses by its name, or one type or None."""
    kinds = _dataclasses_of(hint)
    if len(kinds) < 2:
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        read_inner = _reader(inner, is_older)
        return lambda value: None if value is None else read_inner(value)

    may_be_none = type(None) in get_args(hint)

    def read_one(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        kind = kinds.get(str(value.get(_KIND))) if isinstance(value, dict) else None
        if kind is None:
            raise MismatchError(f"one of {', '.join(kinds)}", _quote(value))
        return _reader(kind, is_older)({key: v for key, v in value.items() if key != _KIND})

    return read_one


def _items_reader(make: Callable[[list[Any]], Any], read_item: _Reader) -> _Reader:
    def read_items(value: Any) -> Any:
        if not isinstance(value, list):
            raise MismatchError("a list", _quote(value))
        found: list[Any] = []
        try:
            for item in value:
                found.append(read_item(item))  # its length is the index of the item that failed
        except MismatchError as error:
            raise error.inside(f"[{len(found)}]") from None
        return make(found)

    return read_items


def _mapping_reader(read_item: _Reader) -> _Reader:
    def read_mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MismatchError("an object", _quote(value))
        return _each(value, dict.fromkeys(value, (frozenset(), read_item)))

    return read_mapping


def _each(plain: Mapping[str, Any], how: Mapping[str, tuple[frozenset[type], _Reader]]) -> dict[str, Any]:
    """Read each value by its name: ``how`` has the types that need no conversion, and the reader for all others."""
    found: dict[str, Any] = {}
    name = ""
    try:
        for name, value in plain.items():
            unchanged, read_value = how[name]
            found[name] = value if type(value) in unchanged else read_value(value)
    except MismatchError as error:
        raise error.inside(name) from None
    return found


def _fields_reader(kind: Any, is_older: bool) -> _Reader:
    hints, all_fields = get_type_hints(kind), fields(kind)
    readers = {f.name: _reader(hints[f.name], is_older) for f in all_fields}
    readers |= {f.name: _row_reader(readers[f.name]) for f in all_fields if "is_row" in f.metadata}
    has_default = {f.name for f in all_fields if f.default is not MISSING or f.default_factory is not MISSING}
    needed = readers.keys() - (has_default if is_older else set())
    how = {name: (_unchanged(hints[name]), read) for name, read in readers.items()}

    def check_names(value: Mapping[str, Any]) -> None:
        for name in sorted(value.keys() - readers.keys()):
            hint = _nearest(name, readers)
            raise MismatchError(f"a field of {kind.__name__}", "an unknown one", hint).inside(name)
        for name in (name for name in readers if name in needed and name not in value):
            raise MismatchError(f"the field {name!r}", f"a {kind.__name__} without it")

    def read_fields(value: Any) -> Any:
        if isinstance(value, list) and len(value) == len(readers):
            value = dict(zip(readers, value, strict=True))
        if not isinstance(value, dict):
            raise MismatchError(f"an object with the fields of a {kind.__name__}", _quote(value))
        if value.keys() != readers.keys():
            check_names(value)
        return kind(**_each(value, how))

    return read_fields


def _unchanged(hint: Any) -> frozenset[type]:
    """Return the types whose values the reader of ``hint`` returns unchanged: most fields need no call of it."""
    if get_origin(hint) in {UnionType, Union} and not _dataclasses_of(hint):
        return frozenset().union({NoneType}, *map(_unchanged, get_args(hint)))
    return frozenset({hint}) if hint in _NAMES else frozenset()


def _member_reader(kind: type[Enum]) -> _Reader:
    """Read a member of an enum: by value if the values are strings, else by name."""
    members = {str(m.value) if issubclass(kind, StrEnum) else m.name: m for m in kind}

    def read_member(value: Any) -> Enum:
        try:
            return members[value]
        except (KeyError, TypeError):
            expected = f"a {kind.__name__} ({', '.join(members)})"
            raise MismatchError(expected, _quote(value), _nearest(value, members)) from None

    return read_member


def _plain_reader(kind: type) -> _Reader:
    def read_plain(value: Any) -> Any:
        if type(value) is not kind:  # exactly: isinstance accepts True as an int
            raise MismatchError(_NAMES.get(kind, f"a {kind.__name__}"), _quote(value))
        return value

    return read_plain


def _float(value: Any) -> float:
    if isinstance(value, str) and value in _UNFINITE:
        return _UNFINITE[value]
    # Other writers may drop the fraction of 1.0. The bound refuses 1e999 and integers that no float can hold.
    if type(value) in {int, float} and abs(value) <= sys.float_info.max:
        return float(value)
    raise MismatchError(f"a number or one of {sorted(_UNFINITE)}", _quote(value))


def _nearest(word: object, known: Any) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return near[0] if near else f"one of {', '.join(sorted(known))}"


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}... ({len(text)} characters)"
