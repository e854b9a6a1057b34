"""Verdicts, and the record of one case on one engine in one world. No torch here.

How they are written is in ``harness.tracing.codec``. Headers and footers carry a further key ``kind`` ("header",
"footer") because they share a file; records have a file to themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

from shardproof.harness.records.hang import HangReport
from shardproof.harness.tracing import codec

RecordKey = tuple[str, str, str]  # engine, case, world


class Verdict(StrEnum):
    """The result of one engine on one case in one world."""

    PASSED = "PASSED"  # every law held, and each could have failed
    FAILED = "FAILED"  # a law was broken
    VACUOUS = "VACUOUS"  # nothing could have gone wrong, so nothing was proven
    UNSUPPORTED = "UNSUPPORTED"  # not declared, and refused loudly
    UNSUPPORTED_SILENT = "UNSUPPORTED_SILENT"  # not declared, yet accepted without a word
    HUNG = "HUNG"  # a rank did not end before the deadline, or waits for one that never comes
    CRASHED = "CRASHED"  # a rank raised or died
    ERRORED = "ERRORED"  # a fault of the harness; proves nothing about the engine
    KNOWN_FAILURE = "KNOWN_FAILURE"  # failed as the expectations file predicts
    UNEXPECTED_PASS = "UNEXPECTED_PASS"  # passed against the expectations file
    NOT_RUN = "NOT_RUN"  # selected, but never reached

    @property
    def is_conforming(self) -> bool:
        """Whether a run with only such verdicts exits 0."""
        return self in {Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.KNOWN_FAILURE}


SCHEMA_VERSION = 11


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
class VisibleError:
    """The smallest error that a case would have seen in one parameter's gradient, or in what updates did to it.

    ``share`` is the error that is allowed over the largest element of the gradient, or of the change since the start,
    in the step where it is smallest.
    """

    quantity: str
    name: str
    share: float


class FaultPhase(StrEnum):
    """The part of a training in which values first went wrong."""

    PREPARE = "prepare"  # until the engine has wrapped the model
    GATHER = "gather"  # a module saw other parameters than the shards that ranks hold
    FORWARD = "forward"
    RECOMPUTE = "recompute"  # a forward inside backward
    BACKWARD = "backward"
    HOLD = "hold"  # gradients were kept and added between backwards
    REDUCE = "reduce"  # between ranks
    REPLICATE = "replicate"  # between replicas of shards
    CLIP = "clip"
    SCALE = "scale"  # by the loss scale
    STEP = "step"  # of the optimizer
    STATE_SAVED = "state saved"
    STATE_LOADED = "state loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where a training first went wrong, found by training once more with probes; it explains a verdict, and is none.

    ``sentence`` says all of it. ``phase`` is None if no value was seen to be wrong: the second training did not repeat
    the failure, or nothing was probed where it is. ``module`` is the module whose call saw or made the wrong value, and
    ``unit`` the unit of the plan that contains it or the wrong tensors, ``""`` being the root; None if there is none.
    ``value`` is the wrong value, ``right`` what was still right before it, ``collective`` the call of the ledger that
    brought it, and ``unseen`` what probes could not see.
    """

    sentence: str
    phase: FaultPhase | None = None
    step: int = -1
    microbatch: int = -1
    ranks: tuple[int, ...] = ()
    unit: str | None = None
    module: str | None = None
    call: int = 0
    value: str = ""
    looks_like: str = ""
    right: str = ""
    collective: str = ""
    unseen: str = ""


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
class Expectation:
    """One known failure, of one case; ``number`` is the place of its cause in the expectations file, from 1.

    ``case`` and ``world`` are globs, ``version`` is a condition on the engine's release, empty for any, and
    ``expiry`` the last day on which it excuses anything (ISO 8601). ``shows`` are globs, of which each broken law must
    match one, or the headline where no law was judged; none where a run was kept by a release without them.
    """

    number: int
    engine: str
    version: str
    case: str
    world: str
    verdict: Verdict
    reason: str
    link: str
    expiry: str
    shows: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"expectation {self.number}: {self.reason} ({self.link}), until {self.expiry}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What a run expects to fail: the entries of ``source``, and the day by which expiry is judged."""

    source: str
    today: str  # ISO 8601, UTC
    entries: tuple[Expectation, ...]


MOST_LISTED = 3  # unused expectations that a terminal shows one by one; of more it shows the number


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedExpectation:
    """An expectation of an engine in the run that bore on nothing there; one that is stale fails the run."""

    expectation: Expectation
    why: str
    is_stale: bool

    def __str__(self) -> str:
        entry = self.expectation
        return f"expectation {entry.number} ({entry.engine}, {entry.case}): {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One verdict with its evidence.

    ``world`` is as on the command line (``threads:4``). ``observation`` is a folder, relative to the run's, or
    empty. ``command`` repeats this one case. ``duration_s`` is wall time of this case. ``expectation`` is
    the one that bore on the verdict or, expired, no longer does. ``hang`` is why ranks could not go on; None
    where they could, or failed otherwise. ``visible`` are the tensors in which errors show least. ``output`` is the
    end of what the ranks' processes printed, unless the verdict is PASSED or UNSUPPORTED. ``known_as`` and
    ``known_version`` are of the known engine from which this one is derived, if any. ``declared_zeros`` counts the
    gradients, over all ranks and steps, that the engine shows as zeros where there are none, as its adapter declares.
    ``wrapper`` are the calls by which the engine wrapped a user's model, and ``by_default`` the verdict on its calls
    without the options that the model needs; empty if it needs none. ``unreached`` are the model's parameters that no
    loss of this case reached: nothing is proven of them. ``located`` is where a wrong value came from; None unless
    values are wrong.
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
    visible: tuple[VisibleError, ...] = ()
    ledger: tuple[LedgerLine, ...] = ()
    outcomes: tuple[OutcomeRecord, ...] = ()
    observation: str = ""
    command: str = ""
    duration_s: float = 0.0
    expectation: Expectation | None = None
    hang: HangReport | None = None
    output: str = ""
    known_as: str = ""
    known_version: str = ""
    declared_zeros: int = 0
    wrapper: str = ""
    by_default: str = ""
    unreached: tuple[str, ...] = ()
    located: Located | None = None
    needs: tuple[str, ...] = ()
    schema: int = SCHEMA_VERSION

    @property
    def key(self) -> RecordKey:
        """What identifies the record in its run."""
        return (self.engine, self.case, self.world)

    @property
    def world_size(self) -> int:
        """The number of ranks in the name of the world; 1 if it has none."""
        size = self.world.split(":")[1] if ":" in self.world else ""
        return int(size) if size.isdigit() else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Where, when and with what a run was made; ``expectations`` is None where raw verdicts were wanted.

    ``shortfalls`` is empty but in the result of judging a run again: what that run lacked, and its records that could
    not be judged again. ``hash_seeds`` are values of ``PYTHONHASHSEED``: the first of all ranks in worlds of threads,
    in worlds of processes one of each rank in turn, for the first 16. ``git_changes`` is a hash of the changes to
    files that git knows, empty if there are none. ``model`` describes the user's model that a check is about.
    ``options`` say which cases were selected, and how they were run.
    """

    started_at: str  # ISO 8601, UTC
    command: str
    engines: tuple[str, ...]
    worlds: tuple[str, ...]
    versions: dict[str, str]
    hardware: dict[str, str]
    git_head: str
    git_dirty: bool
    seed: int  # of the first schedule
    num_cases: int
    num_schedules: int = 1
    is_thorough: bool = False
    expectations: Expectations | None = None
    shortfalls: tuple[str, ...] = ()
    hash_seeds: tuple[int, ...] = ()
    git_changes: str = ""
    model: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A case that does not apply to the user's model, or in this world, and why; the header counts those selected."""

    engine: str
    case: str
    world: str
    suite: str
    why: str
    was_selected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """How much of the power of an engine's cases a run had whose time was limited.

    ``num_ran`` of ``num_cases`` were judged. All of them together kill ``num_killable`` mutants, and those that were
    judged kill ``num_killed``, as far as was measured.
    """

    engine: str
    num_cases: int
    num_ran: int
    num_killable: int
    num_killed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """How a run ended; a run without one was interrupted.

    ``unavailable`` are the engines that were selected and could not be judged, each with the cause. ``is_whole``: every
    case of the suites was collected, as far as a shard of the run says; only then can an expectation be stale.
    ``num_selected`` counts the cases of all shards of this run; 0 where there are no others. ``left_out`` is what does
    not apply to the user's model that a run is about. If the time of the run was limited, ``num_beyond`` of the cases
    that the header counts were not begun, and ``powers`` say what that costs.
    """

    ended_at: str  # ISO 8601, UTC
    duration_s: float
    counts: dict[str, int] = field(default_factory=dict)
    unused: tuple[UnusedExpectation, ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)
    is_whole: bool = False
    num_selected: int = 0
    left_out: tuple[LeftOut, ...] = ()
    num_beyond: int = 0
    powers: tuple[Power, ...] = ()
    schema: int = SCHEMA_VERSION


Line = TypeVar("Line", Record, Header, Footer)

_KINDS: Mapping[type, str] = MappingProxyType({Header: "header", Footer: "footer"})


def to_json(line: Record | Header | Footer) -> str:
    """Return the single JSON line of a record, header or footer."""
    return codec.write(line, kind=_KINDS.get(type(line)))


def from_json(kind: type[Line], text: str, *, where: str) -> Line:
    """Read and check one line; a UsageError that quotes ``where`` (file:line) says what is wrong with it."""
    return codec.read(kind, text, where=where, newest=SCHEMA_VERSION, kind=_KINDS.get(kind))
