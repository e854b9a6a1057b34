"""Judging one case: from how the ranks ended and what they observed to a verdict. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import assert_never

from shardproof.engine.contract import Capability
from shardproof.harness.cases.state_form import StateForm
from shardproof.harness.cases.training import (
    AS_HANDED_OUT,
    AS_HELD,
    HANDED_OUT,
    IGNORED_GRADIENTS,
    KNOWN,
    OF_EACH_RANK,
    RATES,
    TAKEN,
    Training,
    Watch,
)
from shardproof.harness.cases.units import ignored_that_train
from shardproof.harness.cases.user_model import has_level_memory
from shardproof.harness.laws.communication.buffers import LeavesBuffersAlone, ResultsAreWaitedFor, harm_in
from shardproof.harness.laws.communication.counts import ReadsAreSilent
from shardproof.harness.laws.communication.matching import Counterparts, first_disagreement
from shardproof.harness.laws.communication.needs import laws_of_needs
from shardproof.harness.laws.law import Evidence, Law, Ruling
from shardproof.harness.laws.memory.left_behind import LeavesNothingBehind
from shardproof.harness.laws.memory.lifetimes import UserTensorsLive
from shardproof.harness.laws.memory.share import MemoryIsExplained
from shardproof.harness.laws.own_norm import ClipsByTheirNorm
from shardproof.harness.laws.runtime import (
    ComputesAsAsked,
    DrawsApart,
    HandsOutOneState,
    HoldsWhatItShows,
    NoRaces,
    Notes,
    ScalesLosses,
)
from shardproof.harness.laws.structure import num_declared_zeros
from shardproof.harness.laws.turns import WholeInTurn
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.hang import HangReport
from shardproof.harness.records.record import LawRecord, OutcomeRecord, TensorRecord, Verdict, VisibleError
from shardproof.harness.records.saved_result import SavedResult
from shardproof.harness.verdicts.case import Case, Refusal
from shardproof.harness.verdicts.hang_analysis import TRANSPORT_ERRORS, analyse_hang
from shardproof.harness.verdicts.simple_defects import least_visible, unreached
from shardproof.harness.verdicts.vacuity import incomparable_because, vacuous_because
from shardproof.harness.worlds.outcome import (
    Abandoned,
    Died,
    Outcome,
    Raised,
    Returned,
    TimedOut,
    WorldResult,
    causal,
)
from shardproof.harness.worlds.output import SUFFIX
from shardproof.harness.worlds.processes.stacks import is_in_passage

# The error of worlds of threads that explains what the engine did. For sizes that differ, gloo only names bytes
# (gloo#456); nccl hangs, or computes garbage (nccl#1417).
_MISMATCH = "CollectiveMismatchError"

_IMPLIED: tuple[Law, ...] = (
    ReadsAreSilent(),
    LeavesBuffersAlone(),
    ResultsAreWaitedFor(),
    HoldsWhatItShows(),
)
_IMPLIED_BY: Mapping[Watch, Law] = {
    Watch.RACES: NoRaces(),
    Watch.LIFETIMES: UserTensorsLive(at_least=()),  # not every script has the loop hold inputs and outputs
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, the one line that explains it, and its evidence."""

    verdict: Verdict
    headline: str
    laws: tuple[LawRecord, ...] = ()
    worst: TensorRecord | None = None
    visible: tuple[VisibleError, ...] = ()
    outcomes: tuple[OutcomeRecord, ...] = ()
    hang: HangReport | None = None
    declared_zeros: int = 0
    unreached: tuple[str, ...] = ()


def judge(
    case: Case,
    declared: Set[Capability],
    saved: SavedResult,
    oracle: Callable[[], OracleObservation],
    *,
    lacks: str = "",
    simulated: int = 0,
) -> Judgement:
    """Judge every rank of one case; an undeclared capability turns the question into *was it refused?*

    So does what the world ``lacks``. ``oracle`` is called only if there are numbers to compare: a hang or a crash is
    judged without it, and so at once. ``simulated``: so many ranks, of which ``saved`` has some; their numbers mean
    nothing, and the oracle is asked for shapes alone.
    """
    if saved.damage:
        return _judge_damage(saved)
    undeclared = case.training.needs - declared
    if undeclared or lacks:
        return _judge_refusal(lacks or ", ".join(sorted(c.name for c in undeclared)), saved)
    if case.refusal is not Refusal.WRONG:
        refused = _judge_loud_refusal(case, saved)
        if refused is not None:
            return refused
    if saved.refusals:
        rank, words = min(saved.refusals.items())
        headline = f"rank {rank} refused a plan that the engine declares it can honour: {words}"
        return Judgement(verdict=Verdict.CRASHED, headline=headline, outcomes=_outcome_records(saved.result))
    if not saved.result.is_clean:
        return judge_failure(saved)
    return _judge_laws(case, declared, saved, oracle(), simulated)


def implied(training: Training, declared: Set[Capability] = frozenset()) -> tuple[Law, ...]:
    """Return the laws that every training must keep, and those of its watches, whatever a case asks."""
    shows_units = Capability.UNIT_STATE in declared
    watched = (law for watch, law in _IMPLIED_BY.items() if watch in training.watch)
    scaling = training.schedule.scaling
    scaled = () if scaling is None else (ScalesLosses(scaling=scaling),)
    return (
        *_IMPLIED,
        *laws_of_needs(training),
        *scaled,
        *((ComputesAsAsked(),) if training.plan.asks_for_dtypes else ()),
        *((DrawsApart(),) if training.origin is not None or training.resume is not None else ()),
        *_of_loads(training),
        *((Notes(subject=IGNORED_GRADIENTS, value=OF_EACH_RANK),) if ignored_that_train(training) else ()),
        *((HandsOutOneState(),) if Capability.STATE in training.needs else ()),
        *((MemoryIsExplained(),) if training.is_explained else ()),
        *((WholeInTurn(),) if shows_units and training.has_turns else ()),
        *watched,
    )


def implied_last(training: Training) -> tuple[Law, ...]:
    """Return the laws that every training must keep too, and that say less of a fault than a comparison of values."""
    is_clipped_as_one = training.schedule.clip is not None and training.plan.cut_axis is None
    return (
        *((ClipsByTheirNorm(),) if is_clipped_as_one else ()),
        *((LeavesNothingBehind(),) if has_level_memory(training) else ()),
    )


def _of_loads(training: Training) -> Iterator[Law]:
    """Yield what must hold of a whole state that a training hands out and loads."""
    origin, resume = training.origin, training.resume
    steps = [0] if origin is not None and origin.form is StateForm.WHOLE else []
    steps += [resume.after_steps] if resume is not None and resume.form is StateForm.WHOLE else []
    for step in steps:
        yield Notes(subject=HANDED_OUT, value=AS_HELD, step=step)
        yield Notes(subject=TAKEN, value=AS_HANDED_OUT, step=step)
    if resume is not None and resume.schedules_later:
        yield Notes(subject=RATES, value=KNOWN, step=resume.after_steps)


def _judge_damage(saved: SavedResult) -> Judgement:
    """Report the ranks whose files were damaged; the end of a rank comes first, because it may be the reason."""
    cause = causal(saved.result)
    verdict = Verdict.FAILED if cause is None else Verdict.CRASHED
    if isinstance(cause, TimedOut):
        verdict = Verdict.HUNG
    parts = [] if cause is None else [_describe(cause)]
    headline = "; ".join((*parts, *saved.damage, *saved.result.leaks))
    return Judgement(verdict=verdict, headline=headline, outcomes=_outcome_records(saved.result))


def _judge_refusal(needs: str, saved: SavedResult) -> Judgement:
    """Judge whether every rank refused before training; anything else fails, also a crash on the way."""
    outcomes = _outcome_records(saved.result)
    ranks = {o.rank for o in saved.result.outcomes}
    num_ranks = len(ranks)
    if len(saved.refusals) == num_ranks and saved.result.is_clean:
        headline = f"needs {needs}; refused with {saved.refusals[0]}"
        return Judgement(verdict=Verdict.UNSUPPORTED, headline=headline, outcomes=outcomes)
    # A rank that was stopped before its first call, as by a signal, did not go ahead.
    is_stuck = any(
        isinstance(o, TimedOut) and not saved.ledgers_by_rank[o.rank] for o in saved.result.outcomes
    )
    if saved.refusals and len(saved.refusals) < num_ranks and not (is_stuck or _ends_badly(saved.result)):
        others = sorted(ranks - set(saved.refusals))
        headline = (
            f"needs {needs}; refused on rank(s) {sorted(saved.refusals)} with {min(saved.refusals.items())[1]}, "
            f"while rank(s) {others} went ahead"
        )
        return Judgement(verdict=Verdict.FAILED, headline=headline, outcomes=outcomes)
    if saved.result.is_clean:
        headline = f"accepted a plan that needs {needs}, which it does not declare, without a word"
        return Judgement(verdict=Verdict.UNSUPPORTED_SILENT, headline=headline, outcomes=outcomes)
    failure = judge_failure(saved)
    instead = "refused, and then" if saved.refusals else "instead of refusing before training"
    headline = f"needs {needs}, which it does not declare; {instead}: {failure.headline}"
    return replace(failure, headline=headline)


def _ends_badly(result: WorldResult) -> bool:
    """Whether a rank died, or did not end after it had returned, as one that refused has: no rank went ahead then."""
    return any(
        isinstance(o, Died) or (isinstance(o, TimedOut) and o.is_after_result) for o in result.outcomes
    )


def _judge_loud_refusal(case: Case, saved: SavedResult) -> Judgement | None:
    """Judge whether an engine that may or must refuse did so on every rank; None if it may train and did."""
    outcomes = _outcome_records(saved.result)
    words = {**saved.refusals, **_raised(saved.result)}
    if not words:
        if case.refusal is Refusal.ALLOWED or not saved.result.is_clean:
            return None
        headline = "went on with a plan that has no right outcome, without a word"
        return Judgement(verdict=Verdict.FAILED, headline=headline, outcomes=outcomes)
    if saved.result.leaks or _ends_badly(saved.result):
        return judge_failure(saved)  # which a refusal does not excuse
    first, ahead = min(words.items())[1], _went_ahead(saved, words.keys())
    if ahead:
        headline = f"refused on rank(s) {sorted(words)} while rank(s) {ahead} went ahead: {first}"
        return Judgement(verdict=Verdict.FAILED, headline=headline, outcomes=outcomes)
    headline = f"refused, as it {'must' if case.refusal is Refusal.REQUIRED else 'may'}: {first}"
    return Judgement(verdict=Verdict.PASSED, headline=headline, outcomes=outcomes)


def _went_ahead(saved: SavedResult, refused: Set[int]) -> list[int]:
    """Return the ranks that did not refuse, except those stopped before a call that a refusing rank never made.

    A world is stopped when its first rank raises: a rank that is no further may have been about to raise too.
    """
    ledgers = saved.ledgers_by_rank
    calls = Counterparts(ledgers)
    return [
        o.rank
        for o in saved.result.outcomes
        if o.rank not in refused
        and not (
            isinstance(o, Abandoned)
            and all(refused.isdisjoint(calls.absent(o.rank, entry)) for entry in ledgers[o.rank])
        )
    ]


def _raised(result: WorldResult) -> dict[int, str]:
    """Return the words of ranks that raised by themselves; an error of the transport is no refusal."""
    return {
        o.rank: f"{o.kind}: {o.message}"
        for o in result.outcomes
        if isinstance(o, Raised) and not o.is_symptom and o.kind not in TRANSPORT_ERRORS
    }


def judge_failure(saved: SavedResult) -> Judgement:
    """Return the cause of the failure of a world; ledgers explain more than a signal or an error."""
    cause = causal(saved.result)
    outcomes = _outcome_records(saved.result)
    if cause is None:
        headline = "; ".join(saved.result.leaks)
        return Judgement(verdict=Verdict.FAILED, headline=headline, outcomes=outcomes)
    if isinstance(cause, TimedOut) and cause.is_after_result:
        headline = "; ".join((_describe(cause), *saved.result.leaks))
        return Judgement(verdict=Verdict.HUNG, headline=headline, outcomes=outcomes)
    is_hang = isinstance(cause, TimedOut) or (isinstance(cause, Raised) and cause.kind in TRANSPORT_ERRORS)
    if not is_hang and not (isinstance(cause, Raised) and cause.is_symptom):
        return _judge_crash(saved, cause)
    ledgers = saved.ledgers_by_rank
    hang = analyse_hang(saved.result.outcomes, ledgers)
    mismatch = first_disagreement(ledgers)
    if isinstance(cause, Raised) and cause.kind == _MISMATCH:
        verdict, headline = Verdict.FAILED, cause.message
    elif mismatch is not None:
        verdict, headline = Verdict.FAILED, f"{mismatch} (then: {_describe(cause)})"
    elif is_hang:
        verdict, headline = Verdict.HUNG, _describe_hang(saved.result, hang)
    else:
        verdict, headline = Verdict.CRASHED, _describe(cause)
    return Judgement(verdict=verdict, headline=headline, outcomes=outcomes, hang=hang)


def _judge_crash(saved: SavedResult, cause: Outcome) -> Judgement:
    """Return the cause of a crash: the first disagreement of ranks, unless the engine raised an error of its own."""
    ledgers = saved.ledgers_by_rank
    mismatch = first_disagreement(ledgers)
    harm = harm_in(saved.ledgers)  # memory that was freed or overwritten too early may have crashed the rank
    is_own = isinstance(cause, Raised) and not is_in_passage(cause.traceback)
    is_cut_off = isinstance(cause, Died) and not cause.is_after_result
    verdict, causes = Verdict.CRASHED, [_describe(cause)]
    if mismatch is not None and not is_own:
        verdict, causes = Verdict.FAILED, [f"{mismatch} (then: {_describe(cause)})"]
    causes += [f"before that {found}" for found in (harm, mismatch if is_own else None) if found]
    return Judgement(
        verdict=verdict,
        headline="; ".join((*causes, *saved.result.leaks)),
        outcomes=_outcome_records(saved.result),
        hang=analyse_hang(saved.result.outcomes, ledgers) if mismatch or is_cut_off else None,
    )


def _judge_laws(
    case: Case, declared: Set[Capability], saved: SavedResult, oracle: OracleObservation, simulated: int
) -> Judgement:
    evidence = Evidence(
        training=case.training,
        world_size=simulated or len(saved.ranks),
        ranks=saved.ranks,
        oracle=oracle,
    )
    reason = None if simulated else incomparable_because(evidence)
    if reason is not None:
        return Judgement(verdict=Verdict.VACUOUS, headline=reason)
    always = implied(case.training, declared)
    asked = tuple(law for law in case.laws if law not in always)
    laws = (*always, *asked, *implied_last(case.training))
    rulings = [law.judge(evidence) for law in laws]
    broken = [r for r in rulings if not r.record.held]
    worst = next((r.worst for r in broken or rulings if r.worst is not None), None)
    # Simulated numbers mean nothing, and a law of ledgers with nothing to check fails as blind.
    reason = None if broken or simulated else vacuous_because(evidence)
    verdict, visible = Verdict.PASSED, tuple[VisibleError, ...]()
    if broken:
        verdict, headline = Verdict.FAILED, _headline(broken[0])
    elif reason is not None:
        verdict, headline = Verdict.VACUOUS, reason
    else:
        headline = "; ".join(_headline(r) for r in rulings)
        visible = least_visible(evidence) if worst is not None else ()
    return Judgement(
        verdict=verdict,
        headline=headline,
        laws=tuple(r.record for r in rulings),
        worst=worst,
        visible=visible,
        declared_zeros=num_declared_zeros(evidence),
        unreached=unreached(evidence),
    )


def _headline(ruling: Ruling) -> str:
    return f"{ruling.record.law}: {ruling.record.summary}"


def _describe_hang(result: WorldResult, hang: HangReport) -> str:
    """Return which ranks wait for which: equal in every kind of world, unlike the error of a backend."""
    late = sorted(o.rank for o in result.outcomes if isinstance(o, TimedOut))
    hosts = dict.fromkeys(o.host for o in result.outcomes if isinstance(o, TimedOut) and o.host)
    where = f" on {', '.join(hosts)}" if hosts else ""
    # By its text a consequence, but a library of the engine may have raised it for another reason.
    raised = [o for o in result.outcomes if isinstance(o, Raised) and o.is_symptom]
    errors = [_describe(o) for o in raised if o.kind not in TRANSPORT_ERRORS]
    goes_on = late and not any(rank.awaits for rank in hang.ranks)
    slow = "no rank waits for another: the model may only be slow, try a longer --deadline" if goes_on else ""
    parts = [
        hang.summary,
        slow,
        f"not ended at the deadline: rank(s) {late}{where}" if late else "",
        *errors[:1],
    ]
    return "; ".join(part for part in parts if part)


def _rank(outcome: Raised | Died | TimedOut | Abandoned) -> str:
    return f"rank {outcome.rank}" + (f" on {outcome.host}" if outcome.host else "")


def _describe(outcome: Outcome) -> str:
    match outcome:
        case Raised():
            return f"{_rank(outcome)} raised {outcome.kind}: {outcome.message}"
        case Died(is_attributed=True):
            when = " after its result" if outcome.is_after_result else ""
            return f"{_rank(outcome)} {outcome.how}{when}{_where(outcome.text)}"
        case Died():
            how = f"{outcome.how} after their results" if outcome.is_after_result else outcome.how
            return f"the process of all ranks {how}; it is unknown which rank ended it{_where(outcome.text)}"
        case TimedOut(is_after_result=True):
            who = _rank(outcome) if outcome.is_attributed else "the process of all ranks"
            thread = (
                f"; thread {outcome.thread!r}, which is not a daemon, still runs" if outcome.thread else ""
            )
            return f"{who} returned its result and did not end{thread}{_where(outcome.stack)}"
        case TimedOut():
            return (
                f"{_rank(outcome)} did not end; last collective: {outcome.last_call}{_where(outcome.stack)}"
            )
        case Abandoned():
            return f"{_rank(outcome)} was stopped because of another rank"
        case Returned():
            return f"rank {outcome.rank} returned"
        case _:
            assert_never(outcome)


def _where(stack: str) -> str:
    first = stack.strip().splitlines()[0].strip() if stack.strip() else ""
    at = "at " if first.startswith("File ") else ""
    return f"; {at}{first}" if first else ""


def _outcome_records(result: WorldResult) -> tuple[OutcomeRecord, ...]:
    return tuple(
        OutcomeRecord(rank=o.rank, kind=type(o).__name__, text=_evidence_text(o)) for o in result.outcomes
    )


def _evidence_text(outcome: Outcome) -> str:
    if isinstance(outcome, Returned):
        return ""
    printed = f"on {outcome.host}, log host{outcome.rank}{SUFFIX}" if outcome.host else ""
    return f"{printed}\n{_evidence(outcome)}".strip()


def _evidence(outcome: Raised | Died | TimedOut | Abandoned) -> str:
    match outcome:
        case Raised():
            return outcome.traceback or f"{outcome.kind}: {outcome.message}"
        case Died():
            return f"{outcome.how}\n{outcome.text}".strip()
        case TimedOut():
            return f"last collective: {outcome.last_call}\n{outcome.stack}".strip()
        case Abandoned():
            return ""
        case _:
            assert_never(outcome)
