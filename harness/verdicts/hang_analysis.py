"""Hang analysis: computes the hang report from the ledgers and outcomes of a world that hangs. Pure.

[Note: what a rank waits in] A journal records each call before it starts, and the begin and end of each wait. So a rank
is in a blocking call if no wait for it was recorded, or in a wait that has begun and not ended. A wait for a future is
not recorded, and a wait on an accelerator ends before the result is there: then a rank is in the first call of that
kind that cannot have completed, unless its stack ends in code of the engine or the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from shardproof.harness.laws.communication.matching import Counterparts, ProcessGroup, is_message
from shardproof.harness.records.hang import CallRecord, Divergence, HangReport, RankActivity, RankState
from shardproof.harness.tracing.ledger import Entry, Ledger
from shardproof.harness.verdicts.difference import call_record, difference
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, Returned, TimedOut
from shardproof.harness.worlds.processes.stacks import frames_of, own_frames

# Errors of worlds of threads that report a deadlock to a rank: the rank is in the call that raised them.
TRANSPORT_ERRORS = frozenset({"CollectiveMismatchError", "DeadlockError", "CollectiveTimeoutError"})

_MOST_PLACES = 3  # in one line


def analyse_hang(outcomes: Sequence[Outcome], ledgers: Mapping[int, Ledger]) -> HangReport:
    """Return where each rank was, which ranks it waited for, and the first call on which the ranks diverged."""
    counterparts = Counterparts(ledgers)
    entries: dict[int, Entry] = {}
    ranks = []
    for outcome in outcomes:
        found = _examine(outcome, ledgers.get(outcome.rank, ()), counterparts)
        if found.call is not None:
            entries[found.rank.rank] = found.call
        ranks.append(found.rank)
    waiting = {r.rank: r for r in ranks if r.doing is RankActivity.WAITING}
    cycle = _cycle(waiting)
    suspects = _suspects(ranks, cycle)
    first = _first(waiting, suspects, entries)
    has_all = not any(isinstance(outcome, Died) and outcome.exit_code is None for outcome in outcomes)
    parted = _parted(counterparts, entries[first]) if first is not None and has_all else None
    return HangReport(
        summary=_summary(ranks, first, suspects, cycle, parted),
        suspects=suspects,
        cycle=cycle,
        ranks=tuple(ranks),
        difference=parted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examined:
    """A rank and the call that its ledger reports for it."""

    rank: RankState
    call: Entry | None


def _examine(outcome: Outcome, ledger: Ledger, counterparts: Counterparts) -> _Examined:
    stack, is_alive = _remains(outcome)
    own = own_frames(stack)
    frames = frames_of(stack)
    is_in_own_code = bool(own) and frames[0] == own[0]
    held = _held(outcome.rank, ledger, counterparts, is_in_own_code=is_in_own_code) if is_alive else None
    if held is None and isinstance(outcome, Raised) and outcome.kind in TRANSPORT_ERRORS and ledger:
        held = ledger[-1]  # the transport reported the deadlock when the rank made the call
    if isinstance(outcome, Returned):
        doing = RankActivity.RETURNED
    elif not is_alive:
        doing = RankActivity.FAILED
    else:
        doing = RankActivity.OUTSIDE if held is None else RankActivity.WAITING
    call = held or (ledger[-1] if ledger else None)
    rank = RankState(
        rank=outcome.rank,
        ended=_ended(outcome),
        doing=doing,
        call=None if call is None else call_record(counterparts, outcome.rank, call),
        awaits=() if held is None else counterparts.absent(outcome.rank, held),
        frames=own,
        stack=frames,
    )
    return _Examined(rank=rank, call=call)


def _remains(outcome: Outcome) -> tuple[str, bool]:
    """Return a rank's stack, and whether it could have continued if others had joined its call."""
    match outcome:
        case Raised():
            return outcome.traceback, outcome.is_symptom or outcome.kind in TRANSPORT_ERRORS
        case TimedOut() | Abandoned():
            return outcome.stack, True
        case Died():
            return outcome.text, False
        case Returned():
            return "", False
        case _:
            assert_never(outcome)


def _ended(outcome: Outcome) -> str:
    match outcome:
        case Raised():
            return f"raised {outcome.kind}"
        case TimedOut():
            return "not ended at the deadline"
        case Abandoned():
            return "stopped because of another rank"
        case Died():
            return outcome.how
        case Returned():
            return "returned"
        case _:
            assert_never(outcome)


def _held(rank: int, ledger: Ledger, counterparts: Counterparts, *, is_in_own_code: bool) -> Entry | None:
    """Find the call that a rank is in; see [Note: what a rank waits in]."""
    certain = [
        e for e in ledger if (e.wait is None and not e.is_async) or (e.wait and e.wait.is_over is False)
    ]
    if certain:
        # Where an engine has threads of its own there may be several; the rank's own call holds up its training.
        return max(certain, key=lambda e: (e.thread == "main", _since(e)))
    if is_in_own_code:
        return None
    return next((e for e in ledger if e.wait is not None and counterparts.is_stuck(rank, e)), None)


def _since(entry: Entry) -> int:
    """Return how many calls a rank had made when it began to wait."""
    begun = entry.wait.num_issued if entry.wait else None
    return entry.seq + 1 if begun is None else begun


def _cycle(waiting: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the shortest cycle of the wait-for graph through a rank; empty if there is none."""
    best: tuple[int, ...] = ()
    for start in waiting:
        ways: list[tuple[int, ...]] = [(start,)]
        seen: set[int] = set()
        while ways:
            way = ways.pop(0)
            for awaited in waiting[way[-1]].awaits:
                if awaited == start and (not best or len(way) < len(best)):
                    best = way
                if awaited in waiting and awaited not in seen:
                    seen.add(awaited)
                    ways.append((*way, awaited))
    return best


def _suspects(ranks: Sequence[RankState], cycle: tuple[int, ...]) -> tuple[int, ...]:
    waits = Counter(awaited for r in ranks if r.doing is RankActivity.WAITING for awaited in r.awaits)
    free = [r.rank for r in ranks if r.doing is not RankActivity.WAITING and waits[r.rank]]
    if free:
        return tuple(free)
    if cycle:
        most = max(waits[rank] for rank in cycle)
        return tuple(sorted(rank for rank in cycle if waits[rank] == most))
    # No rank waits for another: a rank that did not end and is in no call blocks the world by itself.
    return tuple(r.rank for r in ranks if r.doing is RankActivity.OUTSIDE)


def _first(
    waiting: Mapping[int, RankState], suspects: tuple[int, ...], entries: Mapping[int, Entry]
) -> int | None:
    """Choose the rank that the summary names: one that waits for a suspect, the earliest call first."""
    direct = [r for r, found in waiting.items() if set(found.awaits) & set(suspects)] or list(waiting)
    return min(direct, key=lambda r: (entries[r].seq, r), default=None)


def _parted(counterparts: Counterparts, entry: Entry) -> Divergence | None:
    return None if is_message(entry) else difference(counterparts, ProcessGroup.of(entry))


def _summary(
    ranks: Sequence[RankState],
    first: int | None,
    suspects: tuple[int, ...],
    cycle: tuple[int, ...],
    parted: Divergence | None,
) -> str:
    by_rank = {r.rank: r for r in ranks}
    if first is None:
        return _whereabouts([by_rank[rank] for rank in suspects]) or "no rank waits for another"
    if len(suspects) > 1 and set(suspects) <= set(cycle):
        return f"{_names(cycle)} wait for each other: {'; '.join(_in_turn(by_rank, cycle))}"
    return "; ".join([_waits(by_rank, first, suspects), *_strays(parted)])


def _waits(by_rank: Mapping[int, RankState], first: int, suspects: tuple[int, ...]) -> str:
    """Describe one call that ranks wait in, the ranks that they wait for, and where those are."""
    rank = by_rank[first]
    alike = [
        r.rank
        for r in by_rank.values()
        if r.doing is RankActivity.WAITING and r.awaits == rank.awaits and _is_same(r.call, rank.call)
    ]
    culprits = [r for r in rank.awaits if r in suspects] or list(rank.awaits)
    who = f"{_names(alike)} {'waits' if len(alike) == 1 else 'wait'} in {_describe(rank.call)}"
    if not culprits:
        return f"{who}, which all have come to"
    return f"{who} for {_whereabouts([by_rank[r] for r in culprits])}"


def _in_turn(by_rank: Mapping[int, RankState], cycle: tuple[int, ...]) -> Iterator[str]:
    for rank, awaited in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        yield f"rank {rank} for rank {awaited} in {_describe(by_rank[rank].call)}"


def _strays(parted: Divergence | None) -> list[str]:
    if parted is None or not parted.desynchronised:
        return []
    calls = [(side.ranks, side.call) for side in parted.desynchronised if side.call is not None]
    has_sites = len({call.site for _, call in calls}) > 1
    places = ", ".join(
        f"{_names(ranks)} in {_moment(call)}{f' at {call.site}' if has_sites else ''}"
        for ranks, call in calls
    )
    return [f"from #{calls[0][1].position} on their calls were alike but not their places: {places}"]


def _whereabouts(ranks: Sequence[RankState]) -> str:
    """List ranks by place; of many places the first few."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(_where(rank), []).append(rank.rank)
    shown = [f"{_names(members)} ({place})" for place, members in places.items()]
    more = [f"{len(shown) - _MOST_PLACES} more places"] if len(shown) > _MOST_PLACES else []
    return " and ".join([*shown[:_MOST_PLACES], *more])


def _where(rank: RankState) -> str:
    last = f"last call: {_brief(rank.call)}" if rank.call else "no call before"
    match rank.doing:
        case RankActivity.WAITING:
            return f"waiting in {_describe(rank.call)}{f' for {_names(rank.awaits)}' if rank.awaits else ''}"
        case RankActivity.OUTSIDE:
            at = (rank.frames or rank.stack)[:1]
            return f"in no call, {f'at {at[0]}' if at else 'at an unknown place'}; {last}"
        case RankActivity.RETURNED | RankActivity.FAILED:
            return f"{rank.ended}; {last}"
        case _:
            assert_never(rank.doing)


def _describe(call: CallRecord | None) -> str:
    if call is None:
        return "no call"
    group = f", on axis {call.axis!r}" if call.axis else f", in the group named {call.group_name!r}"
    thread = f", on thread {call.thread!r}" if call.thread else ""
    return f"{call.text}{group if call.group_name else ''}{thread}, {_moment(call)}"


def _brief(call: CallRecord) -> str:
    return f"{call.op} #{call.position} of group {list(call.group)} in {_moment(call)}"


def _moment(call: CallRecord) -> str:
    microbatch = f" of microbatch {call.microbatch}" if call.microbatch >= 0 else ""
    step = f" of step {call.step}" if call.step >= 0 else ""
    unit = f", unit {call.unit!r}" if call.unit else ""
    return f"{call.phase}{microbatch}{step}{unit}"


def _is_same(one: CallRecord | None, other: CallRecord | None) -> bool:
    if one is None or other is None:
        return False
    return (one.op, one.group, one.position, one.peer) == (other.op, other.group, other.position, other.peer)


def _names(ranks: Sequence[int]) -> str:
    """Format ranks, three or more in a row by their ends."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rows[-1][-1] == rank - 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    spelt = [f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spelt)}"
