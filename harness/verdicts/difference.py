"""Where the members of one group diverge: the last call in common, and the first on which they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from shardproof.harness.laws.communication.matching import Counterparts, ProcessGroup
from shardproof.harness.records.hang import CallRecord, Divergence, Side
from shardproof.harness.tracing.ledger import Entry


def difference(counterparts: Counterparts, group: ProcessGroup) -> Divergence | None:
    """Walk the members' calls side by side to the first on which they differ; None if they never do."""
    walk = _Walk(counterparts, group)
    for position in range(walk.longest):
        sides = walk.sides(position, _signature)
        if len(sides) > 1:
            return Divergence(
                group=group.ranks,
                axis=walk.axis,
                group_name=counterparts.name_of(group),
                position=position,
                common=walk.call(min(group.ranks), position - 1),
                sides=sides,
                desynchronised=walk.desynchronised(position),
            )
    return None


def call_record(counterparts: Counterparts, rank: int, entry: Entry) -> CallRecord:
    """Return a rank's call as records describe it."""
    return CallRecord(
        text=entry.describe(),
        op=entry.op,
        group=entry.group,
        axis=entry.axis or "",
        group_name=counterparts.name_of(ProcessGroup.of(entry)),
        position=counterparts.position(rank, entry),
        dtype=entry.dtype,
        num_bytes=entry.num_bytes,
        peer=entry.peer,
        phase=entry.phase,
        step=entry.step,
        microbatch=entry.microbatch,
        unit=entry.unit or "",
        thread="" if entry.thread == "main" else entry.thread,
        site=entry.site,
    )


def _signature(entry: Entry) -> object:
    return entry.signature


def _moment(entry: Entry) -> object:
    return (entry.phase, entry.step, entry.microbatch)


def _place(entry: Entry) -> object:
    return (_moment(entry), entry.unit, entry.site)


class _Walk:
    """The collectives of one group's members, side by side."""

    def __init__(self, counterparts: Counterparts, group: ProcessGroup) -> None:
        self._counterparts = counterparts
        self._calls = counterparts.collectives(group)
        self.longest = max(map(len, self._calls.values()), default=0)
        self.axis = next((e.axis for entries in self._calls.values() for e in entries if e.axis), "")

    def call(self, rank: int, position: int) -> CallRecord | None:
        """Return a member's call at a position; None if it made none."""
        entry = self._at(rank, position)
        return None if entry is None else call_record(self._counterparts, rank, entry)

    def sides(self, position: int, aspect: Callable[[Entry], object]) -> tuple[Side, ...]:
        """Group the ranks whose calls are alike in one aspect; ranks without a call come last."""
        members: dict[object, list[int]] = defaultdict(list)
        for rank in self._calls:
            entry = self._at(rank, position)
            members[None if entry is None else aspect(entry)].append(rank)
        sides = [Side(ranks=tuple(ranks), call=self.call(ranks[0], position)) for ranks in members.values()]
        return tuple(sorted(sides, key=lambda side: side.call is None))

    def desynchronised(self, end: int) -> tuple[Side, ...]:
        """Go back from the difference for as long as calls are alike and made in different places.

        A single such place proves nothing: engines may well call one collective from two lines, by rank. Nor do all
        of them, if only lines and units differ from the very first call on: then that is how the engine is made.
        """
        first = end
        while first > 0 and len(self.sides(first - 1, _place)) > 1:
            first -= 1
        is_habit = first == 0 and all(len(self.sides(i, _moment)) == 1 for i in range(end))
        return () if first == end or is_habit else self.sides(first, _place)

    def _at(self, rank: int, position: int) -> Entry | None:
        entries = self._calls[rank]
        return entries[position] if 0 <= position < len(entries) else None
