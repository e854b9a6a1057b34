"""A record: one verdict with its evidence, one JSON line; the header and footer of a run. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

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
    """Equal entries of one rank's ledger, counted: ``count`` collectives with ``num_bytes`` in all."""

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

_NESTED = MappingProxyType(
    {"laws": LawRecord, "worst": TensorRecord, "ledger": LedgerLine, "outcomes": OutcomeRecord}
)


def to_json(line: Record | Header | Footer) -> str:
    """Give the single JSON line of a record, header or footer."""
    return json.dumps(asdict(line), ensure_ascii=True, separators=(",", ":"))


def from_json(kind: type[Line], text: str, *, where: str) -> Line:
    """Read and check one line; ``where`` (file:line) is quoted in the UsageError for a line that is not one."""
    raise NotImplementedError
