"""Tracks the accesses to each piece of memory and finds unordered ones. Pure on values; no torch here.

[Note: released memory] A caching allocator keeps released memory for the stream that allocated it. It may reuse the
memory for that stream's next allocation at once, in the order in which the host asks. The stream itself runs in order,
but other streams may still use the memory. So a release leaves behind the touches of the old life, and the first touch
of any new life in the same stream's pool must be ordered after all of them. Which released piece a new life gets
depends on sizes and splits that no engine may rely on, so the watch assumes any piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardproof.harness.tracing.races.clock import Clock, Epoch
from shardproof.harness.tracing.races.race_report import RaceKind, Touch


class Span(NamedTuple):
    """A half-open range of bytes of one storage, as offsets from its start."""

    start: int
    end: int

    def meets(self, other: Span) -> bool:
        """Return whether the two overlap."""
        return self.start < other.end and other.start < self.end

    def covers(self, other: Span) -> bool:
        """Return whether this contains all of ``other``."""
        return self.start <= other.start and other.end <= self.end


class Access(NamedTuple):
    """A touch of one range of memory at a moment; ``is_passing``: its timeline is one collective, and ends."""

    touch: Touch
    moment: Epoch
    span: Span
    is_passing: bool = False


class Conflict(NamedTuple):
    """A missing wait: an access that is not ordered after an earlier one."""

    kind: RaceKind
    earlier: Touch


@dataclass(slots=True, eq=False)
class _Life:
    """One piece of memory from its allocation to its release.

    ``accesses`` are those with which a later one may conflict. ``ghosts`` remain from earlier lives of memory that may
    be the same. ``recorded`` are the timelines that `record_stream` named. ``is_gradient``: autograd's engine made it.
    """

    pool: int
    ghosts: tuple[Access, ...] = ()
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    is_gradient: bool = False


class Memory:
    """All the memory of one rank, by a key that is unique among live memory.

    Memory without an announced allocation existed before the watch began: it has no earlier life, and is released to
    the pool of timeline 0.
    """

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}
        # The accesses left by releases, by pool and timeline: per timeline only the latest, which is ordered after the
        # others.
        self._released: dict[int, dict[int, Access]] = {}

    def is_known(self, key: int) -> bool:
        """Return whether the memory was allocated or touched, and is not released."""
        return key in self._lives

    def allocate(self, key: int, pool: int) -> None:
        """Begin a life in memory that was allocated on the timeline ``pool``."""
        self._lives[key] = _Life(pool, ghosts=tuple(self._released.get(pool, {}).values()))

    def record(self, key: int, timeline: int) -> None:
        """Let the allocator wait for ``timeline`` before it reuses the memory."""
        self._life(key).recorded.add(timeline)

    def made_by_autograd(self, key: int) -> None:
        """Record that autograd's engine wrote the memory, as a gradient."""
        self._life(key).is_gradient = True

    def taken_by_autograd(self, key: int, timeline: int) -> None:
        """Let the allocator wait for ``timeline`` if the memory is a gradient: autograd's engine records its stream."""
        if self._life(key).is_gradient:
            self.record(key, timeline)

    def touch(self, key: int, access: Access, clock: Clock) -> list[Conflict]:
        """Add an access that is ordered after ``clock``; return its conflicts with unordered earlier accesses."""
        life = self._life(key)
        conflicts = list(_conflicts(life, access, clock))
        if conflicts and life.ghosts:
            self._forget(
                life.pool, {conflict.earlier for conflict in conflicts if conflict.kind is RaceKind.REUSE}
            )
        life.ghosts = ()
        life.accesses = [old for old in life.accesses if not _replaces(access, old)]
        life.accesses.append(access)
        return conflicts

    def release(self, key: int, clock_of: Callable[[int], Clock]) -> None:
        """End a life; ``clock_of`` returns the clock of a timeline."""
        life = self._lives.pop(key, None)
        if life is None:
            return
        left = self._released.setdefault(life.pool, {})
        for access in life.accesses:
            timeline = access.moment.timeline
            known = left.get(timeline)
            if timeline not in life.recorded and (
                known is None or known.moment.number <= access.moment.number
            ):
                left[timeline] = access
        # Timelines of collectives are many, and end: after the wait they are part of the stream that waited.
        clock = clock_of(life.pool)
        for timeline, access in list(left.items()):
            if access.is_passing and clock.knows(access.moment):
                del left[timeline]

    def _forget(self, pool: int, reported: set[Touch]) -> None:
        """Drop the accesses that were reported as in conflict with a new life: every other life would repeat them."""
        left = self._released.get(pool, {})
        for timeline in [timeline for timeline, access in left.items() if access.touch in reported]:
            del left[timeline]

    def _life(self, key: int) -> _Life:
        if key not in self._lives:
            self._lives[key] = _Life(pool=0)
        return self._lives[key]


def _conflicts(life: _Life, access: Access, clock: Clock) -> Iterator[Conflict]:
    for ghost in life.ghosts:
        if not clock.knows(ghost.moment):
            yield Conflict(RaceKind.REUSE, ghost.touch)
    yield from unordered(life.accesses, access, clock)


def unordered(earlier: Iterable[Access], access: Access, clock: Clock) -> Iterator[Conflict]:
    """Yield the conflicts of an access that is ordered after ``clock`` with earlier ones to the same memory."""
    for old in earlier:
        is_harmless = not (old.touch.is_write or access.touch.is_write)
        if is_harmless or not old.span.meets(access.span) or clock.knows(old.moment):
            continue
        if not access.touch.is_write:
            yield Conflict(RaceKind.READ_AFTER_WRITE, old.touch)
        else:
            is_overwrite = old.touch.is_write
            yield Conflict(
                RaceKind.WRITE_AFTER_WRITE if is_overwrite else RaceKind.WRITE_AFTER_READ, old.touch
            )


def _replaces(new: Access, old: Access) -> bool:
    """Return whether each later conflict with ``old`` is one with ``new`` as well, or was already reported."""
    if not new.span.covers(old.span):
        return False
    is_same_timeline = new.moment.timeline == old.moment.timeline
    return new.touch.is_write or (is_same_timeline and not old.touch.is_write)


def is_memory(tensor: torch.Tensor, device_type: str) -> bool:
    """Return whether a tensor is a plain, nonempty one with memory on such a device."""
    return tensor.device.type == device_type and tensor.layout is torch.strided and tensor.numel() > 0


def span_of(tensor: torch.Tensor) -> Span:
    """Return the byte range of a tensor in its storage, from its first element to its last one."""
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    if tensor.is_contiguous():
        return Span(start, start + tensor.numel() * width)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return Span(start, start + (int(reach) + 1) * width)
