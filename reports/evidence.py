"""A record's evidence, folded so that ranks in the same state share one card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardproof.harness.records.hang import CallRecord, HangReport, RankActivity, RankState, Side
from shardproof.harness.records.record import OutcomeRecord, Record, TensorRecord
from shardproof.reports.text import number, ranks, rough, size, times

_DECADES = 3  # the bar reaches from a thousandth of the allowed error to a thousand times it


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Collectives of one kind in one phase, on all ranks with the same numbers."""

    phase: str
    op: str
    axis: str
    dtype: str
    ranks: str
    count: int
    size: str
    is_split: bool  # other ranks have other numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeGroup:
    """Ranks that ended in the same way, with the same text."""

    ranks: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Error and allowed error on a logarithmic scale; the allowed error is at 50 percent."""

    percent: float
    is_within: bool
    words: str


def ledger_rows(record: Record) -> tuple[LedgerRow, ...]:
    """Fold the ledger over ranks, phase by phase; a rank that differs, or has no such line, is listed separately."""
    everyone = set(range(record.world_size))
    like_rank_0 = everyone - {line.rank for line in record.ledger}
    kinds: dict[tuple[str, str, str, str], dict[tuple[int, int], list[int]]] = {}
    for line in record.ledger:
        same = kinds.setdefault((line.phase, line.op, line.axis, line.dtype), {})
        members = same.setdefault((line.count, line.num_bytes), [])
        members += [0, *sorted(like_rank_0)] if line.rank == 0 else [line.rank]
    phases = list(dict.fromkeys(phase for phase, *_ in kinds))
    rows = (
        LedgerRow(
            phase=phase,
            op=op,
            axis=axis,
            dtype=dtype,
            ranks=f"all {len(everyone)} ranks" if everyone <= set(members) else ranks(members),
            count=count,
            size=size(num_bytes),
            is_split=not everyone <= set(members),
        )
        for (phase, op, axis, dtype), same in kinds.items()
        for (count, num_bytes), members in same.items()
    )
    return tuple(sorted(rows, key=lambda row: phases.index(row.phase)))


def outcome_groups(record: Record) -> tuple[OutcomeGroup, ...]:
    """Fold outcomes over ranks; causes come first, then outcomes that only follow from them."""
    groups: dict[tuple[str, str], list[OutcomeRecord]] = {}
    for outcome in sorted(record.outcomes, key=lambda o: not o.text):
        groups.setdefault((outcome.kind, outcome.text), []).append(outcome)
    return tuple(
        OutcomeGroup(ranks=ranks(o.rank for o in members), kind=kind, text=text)
        for (kind, text), members in groups.items()
    )


def bar(worst: TensorRecord) -> Bar:
    """Place an error on the scale."""
    is_within = worst.ratio <= 1  # False for NaN
    if math.isnan(worst.ratio) or worst.ratio == math.inf:
        position = 1.0
    elif worst.ratio <= 0:
        position = 0.0
    else:
        position = (math.log10(worst.ratio) + _DECADES) / (2 * _DECADES)
    percent = round(100 * min(max(position, 0.0), 1.0), 1)
    return Bar(percent=percent, is_within=is_within, words=times(worst.ratio))


def place(worst: TensorRecord) -> str:
    """Format the position of the worst element."""
    index = f"[{', '.join(map(str, worst.index))}]" if worst.index else ""
    return f"{worst.quantity} {worst.name}{index} on rank {worst.rank} at step {worst.step}"


def headroom(worst: TensorRecord) -> str:
    """Format the error of the worst element."""
    return (
        f"got {number(worst.got)}, expected {number(worst.expected)}; error {rough(worst.error)}"
        f" of {rough(worst.allowed)} allowed ({times(worst.ratio)}); {worst.share:.1%} of elements beyond"
    )


_WORDS = {
    RankActivity.WAITING: "waiting in a call",
    RankActivity.OUTSIDE: "in no call",
    RankActivity.RETURNED: "returned",
    RankActivity.FAILED: "failed",
}

_SHORTLY = ("call", "last call", "when", "waits for")  # the facts of a rank that a few lines of text show


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCard:
    """Ranks in the same state: facts by label, and their stack."""

    ranks: str
    is_suspect: bool
    words: str
    facts: tuple[tuple[str, str], ...]
    frames: tuple[str, ...]
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One position in the order of a group's calls: the call that all made there, or that each side made."""

    number: str
    words: str
    sides: tuple[tuple[str, str], ...]
    is_different: bool


def state_cards(hang: HangReport) -> tuple[StateCard, ...]:
    """Fold ranks that differ only in their number; suspects come last, after the others."""
    groups: dict[RankState, list[int]] = {}
    for rank in hang.ranks:
        groups.setdefault(replace(rank, rank=-1), []).append(rank.rank)
    found = [_card(hang, like, members) for like, members in groups.items()]
    return tuple(sorted(found, key=lambda card: card.is_suspect))


def hang_steps(hang: HangReport) -> tuple[Step, ...]:
    """Return the positions to show, in order: the last in common, where call sites diverged, where calls did."""
    difference = hang.difference
    if difference is None:
        return ()
    found = []
    if difference.common is not None and not difference.desynchronised:
        words = f"all: {_brief(difference.common)}, {_moment(difference.common)}"
        found.append(Step(number=f"#{difference.common.position}", words=words, sides=(), is_different=False))
    if difference.desynchronised:
        calls = [side.call for side in difference.desynchronised if side.call is not None]
        found.append(
            Step(
                number=f"#{calls[0].position}" if calls else "",
                words="alike, and from here on made in different places",
                sides=_sides(difference.desynchronised),
                is_different=False,
            )
        )
    found.append(
        Step(
            number=f"#{difference.position}",
            words="the first difference",
            sides=_sides(difference.sides, hang),
            is_different=True,
        )
    )
    return tuple(found)


def hang_cycle(hang: HangReport) -> str:
    """Format the cycle of the wait-for graph; empty if there is none."""
    return " -> ".join(f"rank {r}" for r in (*hang.cycle, *hang.cycle[:1]))


def hang_lines(hang: HangReport) -> list[str]:
    """Return the hang report in a few lines of plain text, one line for each card."""
    found = []
    for card in state_cards(hang):
        facts = dict(card.facts)
        shown = [f"{label} {facts[label]}" for label in _SHORTLY if label in facts]
        at = [f"at {card.frames[0]}"] if card.frames else []
        found.append(f"{card.ranks}: {card.words}; {', '.join([*shown, *at])}")
    if hang.cycle:
        found.append(f"in a circle: {hang_cycle(hang)}")
    for step in hang_steps(hang):
        sides = "; ".join(f"{who}: {what}" for who, what in step.sides)
        found.append(f"call {step.number}: {step.words}{f': {sides}' if sides else ''}")
    return found


def _card(hang: HangReport, like: RankState, members: Sequence[int]) -> StateCard:
    facts = [("end", like.ended)] if like.ended != _WORDS[like.doing] else []
    if like.call is not None:
        facts.append(("call" if like.doing is RankActivity.WAITING else "last call", _brief(like.call)))
        facts += [
            ("group", _group(like.call)),
            ("payload", f"{like.call.dtype} {size(like.call.num_bytes)}".strip()),
            ("when", _moment(like.call)),
        ]
        facts += [("thread", like.call.thread)] if like.call.thread else []
        facts.append(("made at", like.call.site))
    if like.awaits:
        facts.append(("waits for", ranks(like.awaits)))
    return StateCard(
        ranks=ranks(members),
        is_suspect=not set(members).isdisjoint(hang.suspects),
        words=_WORDS[like.doing],
        facts=tuple(facts),
        frames=like.frames,
        stack=like.stack,
    )


def _sides(sides: Sequence[Side], hang: HangReport | None = None) -> tuple[tuple[str, str], ...]:
    """Format which ranks made which call; for ranks without a call, where they are, if the hang report is given."""
    found = []
    for side in sides:
        if side.call is not None:
            found.append(
                (ranks(side.ranks), f"{_brief(side.call)}, {_moment(side.call)}, at {side.call.site}")
            )
            continue
        places: dict[str, list[int]] = {}
        for rank in () if hang is None else hang.ranks:
            if rank.rank in side.ranks:
                places.setdefault(_instead(rank), []).append(rank.rank)
        found += [(ranks(members), f"never made one; {place}") for place, members in places.items()]
    return tuple(found)


def _instead(rank: RankState) -> str:
    call = "" if rank.call is None else f"{_brief(rank.call)}, {_moment(rank.call)}"
    match rank.doing:
        case RankActivity.WAITING:
            return f"instead waiting in {call}, group {_group(rank.call)}" if rank.call else "waiting"
        case RankActivity.OUTSIDE:
            return f"in no call, {f'at {rank.frames[0]}' if rank.frames else f'last in {call}'}"
        case RankActivity.RETURNED | RankActivity.FAILED:
            return rank.ended


def _brief(call: CallRecord) -> str:
    peer = "" if call.peer is None else f" {_PEERS.get(call.op, 'root')} rank {call.peer}"
    return f"{call.op}{peer} #{call.position}"


_PEERS = {"send": "to", "recv": "from"}


def _group(call: CallRecord) -> str:
    name = call.axis or (f"named {call.group_name}" if call.group_name else "")
    return f"{ranks(call.group)}{f' ({name})' if name else ''}"


def _moment(call: CallRecord) -> str:
    parts = [call.phase]
    parts += [f"step {call.step}"] if call.step >= 0 else []
    parts += [f"microbatch {call.microbatch}"] if call.microbatch >= 0 else []
    parts += [f"unit {call.unit}"] if call.unit else []
    return ", ".join(parts)
