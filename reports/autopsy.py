"""What an autopsy says, folded so that ranks in one plight stand together. Values and plain text; no markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.records.hang import CallRecord, HangReport, RankActivity, RankAutopsy, Side
from reports.text import ranks, size

__all__ = ["Plight", "Step", "cycle", "lines", "plights", "steps"]

_WORDS = {
    RankActivity.WAITING: "waiting in a call",
    RankActivity.OUTSIDE: "in no call",
    RankActivity.RETURNED: "returned",
    RankActivity.FAILED: "failed",
}

_SHORTLY = ("call", "last call", "when", "waits for")  # what a few lines of text tell of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Plight:
    """Ranks that are all in one place: what is told of them, by label, and their stack."""

    ranks: str
    is_blamed: bool
    words: str
    facts: tuple[tuple[str, str], ...]
    frames: tuple[str, ...]
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One place in the order of a group's calls: what all made there, or each side made."""

    number: str
    words: str
    sides: tuple[tuple[str, str], ...]
    is_different: bool


def plights(autopsy: HangReport) -> tuple[Plight, ...]:
    """Fold ranks that differ in nothing but their number; those that are blamed come last, beside the others."""
    groups: dict[RankAutopsy, list[int]] = {}
    for rank in autopsy.ranks:
        groups.setdefault(replace(rank, rank=-1), []).append(rank.rank)
    found = [_plight(autopsy, like, members) for like, members in groups.items()]
    return tuple(sorted(found, key=lambda plight: plight.is_blamed))


def steps(autopsy: HangReport) -> tuple[Step, ...]:
    """Give the places that matter, in order: the last in common, where places parted, where calls parted."""
    difference = autopsy.difference
    if difference is None:
        return ()
    found = []
    if difference.common is not None and not difference.strayed:
        words = f"all: {_brief(difference.common)}, {_moment(difference.common)}"
        found.append(Step(number=f"#{difference.common.position}", words=words, sides=(), is_different=False))
    if difference.strayed:
        first = next(s.call.position for s in difference.strayed if s.call is not None)
        found.append(
            Step(
                number=f"#{first}",
                words="alike, and from here on made in different places",
                sides=_sides(difference.strayed),
                is_different=False,
            )
        )
    found.append(
        Step(
            number=f"#{difference.position}",
            words="the first difference",
            sides=_sides(difference.sides, autopsy),
            is_different=True,
        )
    )
    return tuple(found)


def cycle(autopsy: HangReport) -> str:
    """Spell who waits for whom in a circle; empty where there is none."""
    return " -> ".join(f"rank {r}" for r in (*autopsy.cycle, *autopsy.cycle[:1]))


def lines(autopsy: HangReport) -> list[str]:
    """Tell it in a few lines of plain text, a line for ranks in one plight."""
    found = []
    for plight in plights(autopsy):
        facts = dict(plight.facts)
        told = [f"{label} {facts[label]}" for label in _SHORTLY if label in facts]
        at = [f"at {plight.frames[0]}"] if plight.frames else []
        found.append(f"{plight.ranks}: {plight.words}; {', '.join([*told, *at])}")
    if autopsy.cycle:
        found.append(f"in a circle: {cycle(autopsy)}")
    for step in steps(autopsy):
        sides = "; ".join(f"{who}: {what}" for who, what in step.sides)
        found.append(f"call {step.number}: {step.words}{f': {sides}' if sides else ''}")
    return found


def _plight(autopsy: HangReport, like: RankAutopsy, members: Sequence[int]) -> Plight:
    facts = [("end", like.ended)] if like.ended != _WORDS[like.doing] else []
    if like.call is not None:
        facts.append(("call" if like.doing is RankActivity.WAITING else "last call", _brief(like.call)))
        facts += [
            ("group", _group(like.call)),
            ("payload", _payload(like.call)),
            ("when", _moment(like.call)),
        ]
        facts += [("thread", like.call.thread)] if like.call.thread else []
        facts.append(("made at", like.call.site))
    if like.awaits:
        facts.append(("waits for", ranks(like.awaits)))
    return Plight(
        ranks=ranks(members),
        is_blamed=not set(members).isdisjoint(autopsy.blamed),
        words=_WORDS[like.doing],
        facts=tuple(facts),
        frames=like.frames,
        stack=like.stack,
    )


def _sides(sides: Sequence[Side], autopsy: HangReport | None = None) -> tuple[tuple[str, str], ...]:
    """Spell who made what; of those that made no call, if the autopsy is given, where they are instead."""
    found = []
    for side in sides:
        if side.call is not None:
            found.append(
                (ranks(side.ranks), f"{_brief(side.call)}, {_moment(side.call)}, at {side.call.site}")
            )
            continue
        places: dict[str, list[int]] = {}
        for rank in () if autopsy is None else autopsy.ranks:
            if rank.rank in side.ranks:
                places.setdefault(_instead(rank), []).append(rank.rank)
        found += [(ranks(members), f"never made one; {place}") for place, members in places.items()]
    return tuple(found)


def _instead(rank: RankAutopsy) -> str:
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


def _payload(call: CallRecord) -> str:
    return f"{call.dtype} {size(call.num_bytes)}".strip()


def _moment(call: CallRecord) -> str:
    parts = [call.phase]
    parts += [f"step {call.step}"] if call.step >= 0 else []
    parts += [f"microbatch {call.microbatch}"] if call.microbatch >= 0 else []
    parts += [f"unit {call.unit}"] if call.unit else []
    return ", ".join(parts)
