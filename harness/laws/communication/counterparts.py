"""Which calls of other ranks belong to a call, and which of them have not been made; for ledgers that end too soon.

See [Note: which calls belong together] in ``harness.laws.communication.matching``. Here groups of equal ranks are
told apart by their names too, because this is about who waits for whom and not about what should have been.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from harness.tracing.ledger import Entry, Ledger, Op

__all__ = ["Counterparts", "Group", "is_message"]

# What a rank cannot come back from before all others have come; of the rest, some rank only gives and may go on.
_OF_ALL = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.BARRIER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of ranks; its name is empty in ledgers that were kept without it."""

    ranks: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, entry: Entry) -> Group:
        """Give the group of a call."""
        return cls(ranks=entry.group, name=entry.group_name)


def is_message(entry: Entry) -> bool:
    """Say whether a call is one end of a message, and not a collective."""
    return entry.op in {Op.SEND, Op.RECV}


class Counterparts:
    """The calls of all ranks of a world, by group and by rank."""

    def __init__(self, ledgers: Mapping[int, Ledger]) -> None:
        self._collectives: dict[Group, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        self._messages: dict[tuple[Group, Op, int, int | None], list[Entry]] = defaultdict(list)
        self._position: dict[tuple[int, int], int] = {}
        self._names: dict[tuple[int, ...], set[str]] = defaultdict(set)
        for rank, ledger in ledgers.items():
            for entry in ledger:
                group = Group.of(entry)
                self._names[group.ranks].add(group.name)
                calls = (
                    self._messages[group, entry.op, rank, entry.peer]
                    if is_message(entry)
                    else self._collectives[group][rank]
                )
                self._position[rank, entry.seq] = len(calls)
                calls.append(entry)

    def name_of(self, group: Group) -> str:
        """Give torch's name of a group where another one has the same ranks, else nothing."""
        return group.name if len(self._names[group.ranks]) > 1 else ""

    def position(self, rank: int, entry: Entry) -> int:
        """Count the rank's collectives of that group, or messages that way, before this one."""
        return self._position[rank, entry.seq]

    def collectives(self, group: Group) -> dict[int, list[Entry]]:
        """Give each member's collectives of a group, none for a member that made none."""
        return {rank: self._collectives[group][rank] for rank in group.ranks}

    def absent(self, rank: int, entry: Entry) -> tuple[int, ...]:
        """Give the ranks that have yet to come to a call, or that came with another one in its place."""
        position = self.position(rank, entry)
        if is_message(entry):
            return self._absent_end(rank, entry, position)
        others = {r: calls for r, calls in self.collectives(Group.of(entry)).items() if r != rank}
        missing = tuple(r for r, calls in others.items() if len(calls) <= position)
        return missing or tuple(
            r for r, calls in others.items() if calls[position].signature != entry.signature
        )

    def is_stuck(self, rank: int, entry: Entry) -> bool:
        """Say whether a call that was waited for cannot have completed on this rank, whatever the wait says."""
        is_over = entry.wait is not None and entry.wait.is_over
        return (not is_over or entry.op in _OF_ALL) and bool(self.absent(rank, entry))

    def _absent_end(self, rank: int, entry: Entry, position: int) -> tuple[int, ...]:
        if entry.peer is None:
            return tuple(r for r in entry.group if r != rank)
        other_end = Op.RECV if entry.op is Op.SEND else Op.SEND
        group = Group.of(entry)
        answers = len(self._messages.get((group, other_end, entry.peer, rank), ()))
        if other_end is Op.RECV:  # whoever receives from any source may take this message too
            answers += len(self._messages.get((group, other_end, entry.peer, None), ()))
        return () if position < answers else (entry.peer,)
