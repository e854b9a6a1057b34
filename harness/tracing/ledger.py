"""One collective as one rank issued it, as a plain value. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shardproof.harness.tracing.codec import ROW


class Op(StrEnum):
    """Kinds of communication; one name for all APIs of a collective (list, base, coalesced, functional)."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"


class Phase(StrEnum):
    """The phase of the training loop in which a collective was issued."""

    PREPARE = "prepare"  # until the engine has wrapped the model
    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN = "between"  # the loop itself, outside forward and backward: it gathers units by call
    STEP = "step"  # optimizer step and zero_grad
    MODEL = "model"  # by the model's own code, its loss or its owner, and so not the engine's
    OBSERVE = "observe"  # the harness reads; a collective here is the adapter's, not training's


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Where a collective's result was first waited for (by Work.wait, its future, or a functional wait).

    ``num_issued`` is the number of calls that the rank had issued by then; None in ledgers that predate the field.
    ``is_over`` is whether that wait returned. It is None if unknown: the caller took the future and waits for it
    unobserved, or the ledger predates the field. Worlds may differ in it, because an engine cannot control it.
    """

    phase: Phase
    step: int
    microbatch: int
    num_issued: int | None = None
    is_over: bool | None = field(default=None, compare=False)


class ViolationKind(StrEnum):
    """What happened to a collective's buffers while it was in flight."""

    INPUT_OVERWRITTEN = "its input was overwritten"
    INPUT_FREED = "its input was freed"
    OUTPUT_OVERWRITTEN = "its output was written to"
    OUTPUT_FREED = "its output was freed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferViolation:
    """A use of a collective's buffers before its result was there; ``site`` is the wait that detected it."""

    kind: ViolationKind
    phase: Phase
    step: int
    microbatch: int
    unit: str | None
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective issued by one rank.

    ``num_bytes`` is the payload in one normal form for every API: of an all-gather the gathered output, of a
    reduce-scatter the whole input, of all others the tensor itself. ``shapes`` are the shapes of this rank's
    contribution. ``step`` is -1 before the first step; ``microbatch`` is -1 outside one. ``group`` contains global
    ranks and ``group_seq`` counts that group's collectives on this rank from 0 (point-to-point messages count per
    peer). ``group_name`` is torch's, which distinguishes groups of equal ranks; it is empty in ledgers recorded without
    it. ``unit`` is the innermost unit whose forward or backward was running at the call. ``wait`` is None for a result
    that was not waited for. Only threads worlds record ``harms``.
    """

    seq: int
    op: Op
    group: tuple[int, ...] = field(metadata=ROW)
    group_seq: int
    axis: str | None
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    reduce_op: str | None
    peer: int | None  # global rank of the root, source or destination
    is_async: bool
    wait: Wait | None
    phase: Phase
    step: int
    microbatch: int
    unit: str | None
    thread: str
    site: str
    group_name: str = field(default="", compare=False)
    harms: tuple[BufferViolation, ...] = ()

    @property
    def signature(self) -> tuple[object, ...]:
        """Return the values on which the ranks of the group must agree for the collective to be valid.

        Shapes must agree, except where contributions may differ between ranks: all-to-all, gather, scatter, and the
        list form of all-gather. In an all-gather the total of all contributions must be equal on every rank.
        """
        ragged = self.op in {Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER, Op.ALL_GATHER, Op.BARRIER}
        numel = None if ragged else tuple(_numel(s) for s in self.shapes)
        gathered = self.num_bytes if self.op is Op.ALL_GATHER else None
        return (self.op, self.dtype, self.reduce_op, self.peer, numel, gathered)

    def describe(self) -> str:
        """Format the call for a person, with its call site."""
        reduce_op = f"{self.reduce_op}, " if self.reduce_op else ""
        shapes = " ".join(str(list(s)) for s in self.shapes)
        return (
            f"{self.op}({reduce_op}{self.dtype}{shapes}) as #{self.group_seq} of group {_spell(self.group)}"
            f" at {self.site}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSummary:
    """The fields of an Entry that the call itself determines."""

    op: Op
    group_name: str
    group: tuple[int, ...]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    reduce_op: str | None
    peer: int | None
    is_async: bool
    site: str


Ledger = tuple[Entry, ...]
_LONGEST_GROUP = 64  # ranks that are listed one by one


def _spell(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= _LONGEST_GROUP else f"of {len(ranks)} ranks from {ranks[0]} on"


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def completed(
    entries: Iterable[Entry], waits: Mapping[int, Wait], harms: Mapping[int, tuple[BufferViolation, ...]]
) -> Ledger:
    """Return entries with their waits and harms, which are recorded later, by the entries' numbers."""
    return tuple(replace(e, wait=waits.get(e.seq), harms=harms.get(e.seq, ())) for e in entries)
