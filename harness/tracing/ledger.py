"""One collective as one rank issued it, as a plain value; and how entries travel as JSON. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from types import UnionType
from typing import Any


class Op(StrEnum):
    """Kinds of communication; one name for all spellings of a collective (list, base, coalesced, functional)."""

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
    """What the training loop was doing when a collective was issued."""

    PREPARE = "prepare"  # until the engine has wrapped the model
    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN = "between"  # the loop's own hands, outside forward and backward: units gathered by call
    STEP = "step"  # optimizer step and zero_grad
    OBSERVE = "observe"  # the harness reads; a collective here is the adapter's, not training's


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Where a collective's result was first waited for (by Work.wait, its future, or a functional wait).

    ``num_issued`` is how many calls the rank had issued by then; None in ledgers that predate it.
    ``is_over`` is whether that wait came to its end; None if unknown: the caller took the future and waits for it
    unseen, or the ledger predates this field. Worlds differ in it where they may: an engine
    cannot choose it.
    """

    phase: Phase
    step: int
    microbatch: int
    num_issued: int | None = None
    is_over: bool | None = field(default=None, compare=False)


class ViolationKind(StrEnum):
    """What became of a collective's buffers while it was under way."""

    INPUT_OVERWRITTEN = "its input was overwritten"
    INPUT_FREED = "its input was freed"
    OUTPUT_OVERWRITTEN = "its output was written to"
    OUTPUT_FREED = "its output was freed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferViolation:
    """Something done to a collective's buffers before its result was there, and where that was noticed, at the wait."""

    kind: ViolationKind
    phase: Phase
    step: int
    microbatch: int
    unit: str | None
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective issued by one rank.

    ``num_bytes`` is the payload in one normal form for every spelling: of an all-gather the gathered
    output, of a reduce-scatter the whole input, of the rest the tensor itself. ``shapes`` are the shapes
    of this rank's contribution. ``step`` is -1 before the first step; ``microbatch`` is -1 outside one.
    ``group`` holds global ranks and ``group_seq`` counts that group's collectives on this rank from 0
    (point-to-point messages count per peer); ``group_name`` is torch's, which tells groups of equal ranks apart,
    empty in ledgers that were kept without it. ``unit`` is the innermost unit whose forward or backward was
    under way when the call was made. ``wait`` is None for a result that was not waited for. ``harms`` are known of
    worlds of threads alone.
    """

    seq: int
    op: Op
    group: tuple[int, ...]
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
        """What must agree over the ranks of the group for the collective to mean anything.

        Shapes agree except where a rank's contribution may differ by nature (all-to-all, gather, scatter,
        and the list form of all-gather, whose sizes the backend checks).
        """
        ragged = self.op in {Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER, Op.ALL_GATHER, Op.BARRIER}
        numel = None if ragged else tuple(_numel(s) for s in self.shapes)
        return (self.op, self.dtype, self.reduce_op, self.peer, numel)

    def describe(self) -> str:
        """Format the call for a person, with where it was made."""
        reduce_op = f"{self.reduce_op}, " if self.reduce_op else ""
        shapes = " ".join(str(list(s)) for s in self.shapes)
        return (
            f"{self.op}({reduce_op}{self.dtype}{shapes}) as #{self.group_seq} of group {_spell(self.group)}"
            f" at {self.site}"
        )


Ledger = tuple[Entry, ...]
_LONGEST_GROUP = 64  # ranks that are written one by one
_MOST_RANKS = 2**20  # of a group in a file


def _spell(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= _LONGEST_GROUP else f"of {len(ranks)} ranks from {ranks[0]} on"


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


_FIELDS = tuple(f.name for f in fields(Entry))


def entry_to_json(entry: Entry) -> dict[str, object]:
    """Return the JSON object of an entry; enums become their values, tuples lists."""
    result: dict[str, object] = {name: getattr(entry, name) for name in _FIELDS}
    if entry.wait is not None:
        result["wait"] = wait_to_json(entry.wait)
    del result["harms"]  # written where they are noticed, as lines of their own
    result["group"] = _ranks_to_json(entry.group)
    return result


# Any: JSON.
@lru_cache(maxsize=64)
def _ranks_to_json(ranks: tuple[int, ...]) -> Any:
    """Return a long row of ranks as its first, its end and its step: a journal has one for each call."""
    if len(ranks) <= _LONGEST_GROUP:
        return ranks
    row = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0] or 1)
    return {"first": row.start, "end": row.stop, "step": row.step} if ranks == tuple(row) else ranks


# Any: as above.
def _ranks_from_json(found: Any) -> tuple[int, ...]:
    if isinstance(found, dict):
        expect(int, found["first"], found["end"], found["step"])
        return _row(found["first"], found["end"], found["step"])
    expect(list, found)
    expect(int, *found)
    return tuple(found)


@lru_cache(maxsize=64)
def _row(first: int, end: int, step: int) -> tuple[int, ...]:
    if (end - first) // step > _MOST_RANKS:
        raise ValueError(f"expected at most {_MOST_RANKS} ranks, got a row from {first} to {end}")
    return tuple(range(first, end, step))


def wait_to_json(wait: Wait) -> dict[str, object]:
    """Return the JSON object of a wait."""
    return {
        "phase": wait.phase,
        "step": wait.step,
        "microbatch": wait.microbatch,
        "num_issued": wait.num_issued,
        "is_over": wait.is_over,
    }


def expect(kind: type | UnionType, *values: object) -> None:
    """Raise TypeError for a value of another type: JSON that was damaged may hold any."""
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"expected {kind}, got {type(value).__name__}")


# Any: JSON.
def wait_from_json(data: Mapping[str, Any]) -> Wait:
    """Read what `wait_to_json` wrote, or a release that did not count what was issued."""
    expect(int, data["step"], data["microbatch"])
    expect(int | None, data.get("num_issued"))
    return Wait(
        phase=Phase(data["phase"]),
        step=data["step"],
        microbatch=data["microbatch"],
        num_issued=data.get("num_issued"),
        is_over=data.get("is_over"),
    )


def harm_to_json(harm: BufferViolation) -> dict[str, object]:
    """Return the JSON object of a harm."""
    return asdict(harm)


def completed(
    entries: Iterable[Entry], waits: Mapping[int, Wait], harms: Mapping[int, tuple[BufferViolation, ...]]
) -> Ledger:
    """Return entries with their waits and harms, which are known later, by the entries' numbers."""
    return tuple(replace(e, wait=waits.get(e.seq), harms=harms.get(e.seq, ())) for e in entries)


# Any: JSON.
def harm_from_json(data: Mapping[str, Any]) -> BufferViolation:
    """Read what `harm_to_json` wrote."""
    return BufferViolation(**{**data, "kind": ViolationKind(data["kind"]), "phase": Phase(data["phase"])})


def entry_from_json(data: Mapping[str, object]) -> Entry:
    """Read what `entry_to_json` wrote."""
    plain: dict[str, object] = dict(data)
    wait = plain["wait"]
    shapes, group = plain["shapes"], plain["group"]
    if not isinstance(shapes, list):
        raise TypeError("expected a list of shapes")
    expect(int, *(size for shape in shapes for size in shape))
    plain.update(
        op=Op(str(plain["op"])),
        phase=Phase(str(plain["phase"])),
        shapes=tuple(tuple(s) for s in shapes),
        group=_ranks_from_json(group),
        wait=wait_from_json(wait) if isinstance(wait, dict) else None,
    )
    entry = Entry(**plain)  # type: ignore[arg-type]  # JSON is untyped; Entry's own fields name what is missing
    expect(int, entry.seq, entry.group_seq, entry.num_bytes, entry.step, entry.microbatch)
    expect(str, entry.dtype, entry.thread, entry.site, entry.group_name)
    expect(str | None, entry.axis, entry.reduce_op, entry.unit)
    expect(int | None, entry.peer)
    return entry
