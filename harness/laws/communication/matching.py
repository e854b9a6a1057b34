"""Matches the calls of several ranks that form one collective, and has the law that ranks agree on them.

See [Note: which calls belong together] in ``harness.laws.communication.matching``. Here groups of equal ranks are also
distinguished by their names, because this is the wait-for relation and not the expected communication.

[Note: which calls belong together] The n-th collective of a group must be the same on all of its members, so calls are
matched by their position among the rank's collectives in that group. Groups of equal ranks are distinguished by torch's
name for them: members share that name, because they rendezvous by it. Point-to-point messages are matched by position
among those from one rank to one other within a group. A receive from any source takes any remaining message, so for a
rank with such receives only the totals are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from shardproof.harness.laws.communication.select import NOTHING_OBSERVED, shows_nothing
from shardproof.harness.laws.law import Evidence, Ruling
from shardproof.harness.records.record import LawRecord
from shardproof.harness.tracing.ledger import Entry, Ledger, Op

# Collectives that no rank can leave before all have entered; in the others, a rank that only sends may go on.
_OF_ALL = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.BARRIER})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """One group of ranks; its name is empty in ledgers that were kept without it."""

    ranks: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, entry: Entry) -> ProcessGroup:
        return cls(ranks=entry.group, name=entry.group_name)


def is_message(entry: Entry) -> bool:
    """Return whether a call is one end of a message, and not a collective."""
    return entry.op in {Op.SEND, Op.RECV}


class Counterparts:
    """The calls of all ranks of a world, by group and by rank."""

    def __init__(self, ledgers: Mapping[int, Ledger]) -> None:
        self._collectives: dict[ProcessGroup, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        self._messages: dict[tuple[ProcessGroup, Op, int, int | None], list[Entry]] = defaultdict(list)
        self._position: dict[tuple[int, int], int] = {}
        self._names: dict[tuple[int, ...], set[str]] = defaultdict(set)
        for rank, ledger in ledgers.items():
            for entry in ledger:
                group = ProcessGroup.of(entry)
                self._names[group.ranks].add(group.name)
                calls = (
                    self._messages[group, entry.op, rank, entry.peer]
                    if is_message(entry)
                    else self._collectives[group][rank]
                )
                self._position[rank, entry.seq] = len(calls)
                calls.append(entry)

    def name_of(self, group: ProcessGroup) -> str:
        """Return torch's name of a group where another group has the same ranks, else an empty string."""
        return group.name if len(self._names[group.ranks]) > 1 else ""

    def position(self, rank: int, entry: Entry) -> int:
        """Count the rank's collectives of that group, or messages in that direction, before this one."""
        return self._position[rank, entry.seq]

    def collectives(self, group: ProcessGroup) -> dict[int, list[Entry]]:
        """Return each member's collectives of a group; empty for a member that made none."""
        return {rank: self._collectives[group][rank] for rank in group.ranks}

    def absent(self, rank: int, entry: Entry) -> tuple[int, ...]:
        """Return the ranks that have not yet made a call, or that made a different one in its place."""
        position = self.position(rank, entry)
        if is_message(entry):
            return self._absent_end(rank, entry, position)
        others = {r: calls for r, calls in self.collectives(ProcessGroup.of(entry)).items() if r != rank}
        missing = tuple(r for r, calls in others.items() if len(calls) <= position)
        return missing or tuple(
            r for r, calls in others.items() if calls[position].signature != entry.signature
        )

    def is_stuck(self, rank: int, entry: Entry) -> bool:
        """Return whether a call that was waited for cannot have completed on this rank, although the wait returned."""
        is_over = entry.wait is not None and entry.wait.is_over
        return (not is_over or entry.op in _OF_ALL) and bool(self.absent(rank, entry))

    def _absent_end(self, rank: int, entry: Entry, position: int) -> tuple[int, ...]:
        if entry.peer is None:
            return tuple(r for r in entry.group if r != rank)
        other_end = Op.RECV if entry.op is Op.SEND else Op.SEND
        group = ProcessGroup.of(entry)
        answers = len(self._messages.get((group, other_end, entry.peer, rank), ()))
        if other_end is Op.RECV:  # a receive from any source may take this message too
            answers += len(self._messages.get((group, other_end, entry.peer, None), ()))
        return () if position < answers else (entry.peer,)


class Extent(Enum):
    """How complete the ledgers are."""

    COMPLETE = "every rank came to its end"  # a call without counterpart is wrong
    PARTIAL = "some rank stopped on the way"  # a call without counterpart may only be early


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksAgree:
    """Every collective is the same on every member of its group, and every message has a receiver."""

    @property
    def name(self) -> str:
        return "ranks agree on every collective"

    def judge(self, evidence: Evidence) -> Ruling:
        ledgers = {o.rank: o.ledger for o in evidence.ranks}
        broken = [*_unobserved(ledgers, evidence.world_size)]
        broken += [d.text for d in sorted(_disagreements(ledgers, Extent.COMPLETE), key=_first_issued)]
        if broken:
            record = LawRecord(law=self.name, held=False, summary=broken[0], details=tuple(broken))
            return Ruling(record=record)
        num_groups = len({ProcessGroup.of(e) for ledger in ledgers.values() for e in ledger})
        calls = sum(len(ledger) for ledger in ledgers.values())
        held = f"{calls} calls in {num_groups} group{'s' * (num_groups != 1)}"
        return Ruling(record=LawRecord(law=self.name, held=True, summary=held))


def first_disagreement(ledgers: Mapping[int, Ledger], extent: Extent = Extent.PARTIAL) -> str | None:
    """Describe the earliest call on which ranks disagree, None if there is none.

    In partial ledgers, of a world that hung or died, calls that another rank never reached are not faults.
    """
    found = min(_disagreements(ledgers, extent), key=_first_issued, default=None)
    return None if found is None else found.text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disagreement:
    """A disagreement between ranks; ``seq`` is the first of their calls in it."""

    seq: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Channel:
    """Messages from one rank to another within a group."""

    group: tuple[int, ...]
    source: int
    destination: int


def _first_issued(disagreement: _Disagreement) -> int:
    return disagreement.seq


def _unobserved(ledgers: Mapping[int, Ledger], world_size: int) -> list[str]:
    """Return the ranks whose agreement proves nothing: an engine on several ranks must communicate."""
    silent = [r for r in range(world_size) if world_size > 1 and shows_nothing(ledgers.get(r, ()))]
    return [f"rank {r}: {NOTHING_OBSERVED}" for r in silent]


def _disagreements(ledgers: Mapping[int, Ledger], extent: Extent) -> Iterator[_Disagreement]:
    for group, calls in _collectives(ledgers).items():
        found = _first_in_group(group, calls, extent)
        if found is not None:
            yield found
    yield from _message_disagreements(ledgers, extent)


def _collectives(ledgers: Mapping[int, Ledger]) -> dict[ProcessGroup, dict[int, list[Entry]]]:
    """Sort collectives by group, then by rank; members that made no call have an empty list."""
    groups: dict[ProcessGroup, dict[int, list[Entry]]] = {}
    for rank, ledger in ledgers.items():
        for entry in ledger:
            if entry.op in {Op.SEND, Op.RECV}:
                continue
            members = groups.setdefault(ProcessGroup.of(entry), {m: [] for m in entry.group if m in ledgers})
            members.setdefault(rank, []).append(entry)
    return groups


def _first_in_group(
    group: ProcessGroup, calls: Mapping[int, list[Entry]], extent: Extent
) -> _Disagreement | None:
    """Return the group's first call on which its members differ."""
    for position in range(max(map(len, calls.values()))):
        made = {rank: entries[position] for rank, entries in calls.items() if position < len(entries)}
        seq = min(e.seq for e in made.values())
        if len({e.signature for e in made.values()}) > 1:
            return _Disagreement(
                seq=seq, text=f"group {list(group.ranks)} disagrees on call #{position}: {_sides(made)}"
            )
        absent = sorted(set(calls) - set(made))
        if absent and extent is Extent.COMPLETE:
            text = (
                f"group {list(group.ranks)} call #{position}: {_sides(made)}; {_ranks(absent)} never made it"
            )
            return _Disagreement(seq=seq, text=text)
    return None


def _sides(made: Mapping[int, Entry]) -> str:
    """Format each version of a call with the ranks that made it."""
    sides: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in sorted(made):
        sides[made[rank].signature].append(rank)
    return "; ".join(f"{_ranks(ranks)} called {made[ranks[0]].describe()}" for ranks in sides.values())


def _ranks(ranks: Collection[int]) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {sorted(ranks)}"


def _message_disagreements(ledgers: Mapping[int, Ledger], extent: Extent) -> Iterator[_Disagreement]:
    sent, received = _messages(ledgers, Op.SEND), _messages(ledgers, Op.RECV)
    takers = _takers_from_any(ledgers)
    for channel in sorted({*sent, *received}, key=lambda c: (c.group, c.source, c.destination)):
        if not {channel.source, channel.destination} <= ledgers.keys() or channel.destination in takers:
            continue
        ends = (sent.get(channel, []), received.get(channel, []))
        found = _first_on_channel(channel, *ends, extent)
        if found is not None:
            yield found
    if extent is Extent.COMPLETE:
        yield from (d for rank in takers if (d := _total_disagreement(ledgers, rank)) is not None)


def _first_on_channel(
    channel: _Channel, sent: list[Entry], received: list[Entry], extent: Extent
) -> _Disagreement | None:
    way = f"message #{{}} from rank {channel.source} to rank {channel.destination}"
    for position, (left, right) in enumerate(zip(sent, received, strict=False)):
        if (left.dtype, left.num_bytes) != (right.dtype, right.num_bytes):
            text = f"{way.format(position)}: sent as {left.describe()}, received as {right.describe()}"
            return _Disagreement(seq=min(left.seq, right.seq), text=text)
    if extent is Extent.COMPLETE and len(sent) != len(received):
        position = min(len(sent), len(received))
        alone = max(sent, received, key=len)[position]
        verb = "received" if alone.op is Op.SEND else "sent"
        return _Disagreement(
            seq=alone.seq, text=f"{way.format(position)} was never {verb}: {alone.describe()}"
        )
    return None


def _total_disagreement(ledgers: Mapping[int, Ledger], rank: int) -> _Disagreement | None:
    inbox = [e for e in ledgers[rank] if e.op is Op.RECV]
    sent = [e for ledger in ledgers.values() for e in ledger if e.op is Op.SEND and e.peer == rank]
    if len(inbox) == len(sent):
        return None
    text = f"rank {rank} receives from any source: {len(inbox)} receives for {len(sent)} messages sent to it"
    return _Disagreement(seq=min(e.seq for e in (*inbox, *sent)), text=text)


def _messages(ledgers: Mapping[int, Ledger], op: Op) -> dict[_Channel, list[Entry]]:
    """Sort one side of all messages by channel; receives from any source have none."""
    channels: dict[_Channel, list[Entry]] = defaultdict(list)
    for rank, ledger in ledgers.items():
        for entry in ledger:
            if entry.op is op and entry.peer is not None:
                source, destination = (rank, entry.peer) if op is Op.SEND else (entry.peer, rank)
                channels[_Channel(group=entry.group, source=source, destination=destination)].append(entry)
    return channels


def _takers_from_any(ledgers: Mapping[int, Ledger]) -> list[int]:
    return sorted(
        r for r, ledger in ledgers.items() if any(e.op is Op.RECV and e.peer is None for e in ledger)
    )
