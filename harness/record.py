"""A record: one verdict with its evidence, one JSON line; the header and footer of a run. No torch here.

[Note: what a line looks like]
A line is one JSON object whose keys are the fields of the dataclass, nested values included. Headers and
footers carry a further key ``kind`` ("header", "footer") because they share a file; records have a file to
themselves. JSON knows no NaN and no infinity, and parsers disagree about the literals that Python would
write, so a float that is not finite travels as one of the strings "nan", "inf", "-inf". A line at the
current schema must have every field; in a line of an older schema a field that has a default may be absent.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from harness.errors import UsageError
from harness.verdict import Verdict

__all__ = [
    "SCHEMA_VERSION",
    "Footer",
    "Header",
    "LawRecord",
    "LedgerLine",
    "OutcomeRecord",
    "Record",
    "TensorRecord",
    "from_json",
    "to_json",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LawRecord:
    """How one law came out; ``details`` are further lines, the worst first."""

    law: str
    held: bool
    summary: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """The worst tensor of a parity check: where it is and how far off.

    ``error`` and ``allowed`` are absolute, in the tensor's own unit; ``ratio`` is error / allowed;
    ``share`` is the part of elements beyond what is allowed; ``looks_like`` characterises the error.
    """

    quantity: str
    name: str
    step: int
    rank: int
    index: tuple[int, ...]
    got: float
    expected: float
    error: float
    allowed: float
    ratio: float
    share: float
    looks_like: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """Equal entries of one rank's ledger, counted: ``count`` collectives with ``num_bytes`` in all.

    A rank without any line did as rank 0 did.
    """

    rank: int
    phase: str
    op: str
    axis: str
    dtype: str
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRecord:
    """How one rank ended; ``text`` is the error, exit status or stack."""

    rank: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One verdict with its evidence.

    ``world`` is as on the command line (``threads:4``). ``observation`` is a folder below the run's, or
    empty. ``command`` repeats this one case. ``duration_s`` is wall time of this case.
    """

    engine: str
    case: str
    world: str
    verdict: Verdict
    headline: str
    suite: str
    engine_version: str
    laws: tuple[LawRecord, ...] = ()
    worst: TensorRecord | None = None
    ledger: tuple[LedgerLine, ...] = ()
    outcomes: tuple[OutcomeRecord, ...] = ()
    observation: str = ""
    command: str = ""
    duration_s: float = 0.0
    schema: int = SCHEMA_VERSION

    @property
    def world_size(self) -> int:
        """How many ranks the world had, read from its spelling; 1 where that says nothing."""
        size = self.world.split(":")[1] if ":" in self.world else ""
        return int(size) if size.isdigit() else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Where, when and with what a run was made."""

    started_at: str  # ISO 8601, UTC
    command: str
    engines: tuple[str, ...]
    worlds: tuple[str, ...]
    versions: dict[str, str]
    hardware: dict[str, str]
    git_head: str
    git_dirty: bool
    seed: int
    num_cases: int
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """How a run ended; a run without one was interrupted."""

    ended_at: str  # ISO 8601, UTC
    duration_s: float
    counts: dict[str, int] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION


Line = TypeVar("Line", Record, Header, Footer)

_KINDS: Mapping[type, str] = MappingProxyType({Header: "header", Footer: "footer"})
_UNFINITE: Mapping[str, float] = MappingProxyType({"nan": math.nan, "inf": math.inf, "-inf": -math.inf})


def to_json(line: Record | Header | Footer) -> str:
    """Give the single JSON line of a record, header or footer; see [Note: what a line looks like]."""
    kind = _KINDS.get(type(line))
    plain = ({} if kind is None else {"kind": kind}) | _encode(line)
    return json.dumps(plain, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def from_json(kind: type[Line], text: str, *, where: str) -> Line:
    """Read and check one line; a UsageError that quotes ``where`` (file:line) says what is wrong with it."""
    at = _Place(where=where, field="", schema=SCHEMA_VERSION)
    plain = _parse(text, at)
    if not isinstance(plain, dict):
        raise at.refusal(expected=f"a JSON object with the fields of a {kind.__name__}", value=plain)
    at = replace(at, schema=_schema_of(plain, at))
    if kind in _KINDS and (found := plain.pop("kind", None)) != _KINDS[kind]:
        raise at.inside("kind").refusal(expected=repr(_KINDS[kind]), value=found)
    line: Line = _decode_fields(kind, plain, at)
    return line


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Which field of which line is being read, and the schema that the line says it has."""

    where: str
    field: str
    schema: int

    def inside(self, name: str) -> _Place:
        """Step into a field or, with ``[i]``, an item."""
        dot = "." if self.field and not name.startswith("[") else ""
        return replace(self, field=f"{self.field}{dot}{name}")

    def refusal(self, *, expected: str, value: object, hint: str = "") -> UsageError:
        """Say what is wrong here; ``value`` is what came."""
        return self.complaint(expected=expected, got=_quote(value), hint=hint)

    def complaint(self, *, expected: str, got: str, hint: str = "") -> UsageError:
        """Say what is wrong here in words."""
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
        raise at.refusal(expected=f"a version from 1 to {SCHEMA_VERSION}", value=schema)
    if schema > SCHEMA_VERSION:
        raise at.refusal(
            expected=f"at most {SCHEMA_VERSION}",
            value=schema,
            hint="the newer shardproof that wrote this run",
        )
    return schema


def _decode_fields(kind: type, plain: Any, at: _Place) -> Any:
    if not isinstance(plain, dict):
        raise at.refusal(expected=f"an object with the fields of a {kind.__name__}", value=plain)
    hints = _hints(kind)
    for name in sorted(plain.keys() - hints.keys()):
        raise at.inside(name).complaint(
            expected=f"a field of {kind.__name__}", got="an unknown one", hint=_nearest(name, hints)
        )
    absent = [f.name for f in fields(kind) if f.name not in plain and not _may_be_absent(f, at)]
    if absent:
        raise at.complaint(expected=f"the field {absent[0]!r}", got=f"a {kind.__name__} without it")
    return kind(**{name: _decode(hints[name], value, at.inside(name)) for name, value in plain.items()})


def _may_be_absent(of: Field[Any], at: _Place) -> bool:
    has_default = of.default is not MISSING or of.default_factory is not MISSING
    return has_default and at.schema < SCHEMA_VERSION


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
