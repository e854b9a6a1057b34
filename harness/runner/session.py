"""Judges the cases of a session: from case, engine and world to a record, under every requested schedule."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from shardproof.engine.contract import Capability
from shardproof.harness.cases.training import Watch
from shardproof.harness.errors import LostHostError, UnreadableError, UsageError
from shardproof.harness.laws.diagnosis import NOT_FINITE
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.laws.runtime import NoRaces
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.ledger_summary import summarize
from shardproof.harness.records.record import LedgerLine, Located, Record, Verdict
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.engines import EngineDescription
from shardproof.harness.runner.locating import locate, probed
from shardproof.harness.runner.observations import Observations, Source
from shardproof.harness.runner.options import Keep, RunOptions
from shardproof.harness.runner.oracles import Oracles
from shardproof.harness.runner.training_request import Identities, Request
from shardproof.harness.verdicts.case import Case
from shardproof.harness.verdicts.judgement import Judgement, judge
from shardproof.harness.worlds.machine import machine_fault
from shardproof.harness.worlds.output import ANY_OUTPUT, LEFT_FILES, printed
from shardproof.harness.worlds.spec import WorldKind

__all__ = ["Source", "TrialSession"]


# A case that expects a hang has a short deadline; the oracle trains for all ranks in turn, a few times.
_LEAST_FOR_ORACLE_S = 30.0
_QUIET = frozenset({Verdict.PASSED, Verdict.UNSUPPORTED})  # verdicts that need no explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The judgement of a case, and the seed of its schedule."""

    judgement: Judgement
    seed: int
    ledger: tuple[LedgerLine, ...] = ()
    wrapper: str = ""


class TrialSession:
    """Runs and judges cases."""

    def __init__(self, source: Source, effort: RunOptions | None = None) -> None:
        self._effort = effort or RunOptions()
        identities = Identities()
        self._observations = Observations(source, identities)
        self._oracles = Oracles(source, identities)
        self._is_replay = source.is_replay
        self._keeps_all = source.is_replay or source.keep is Keep.ALL
        self._last: tuple[Request, _Judged] | None = None

    def run(self, case: Case, cell: Cell, *, suite: str, command: str, lacks: str = "") -> Record:
        """Judge one case in one cell; the harness's own errors become the verdict ERRORED, the caller's are raised.

        If the world ``lacks`` something that the case needs, the case is not run. Raises UnreadableError if
        observations are only read again, and these cannot be read.
        """
        started = time.monotonic()
        case = replace(case, training=self._effort.applied(case.training))
        request = Request(training=case.training, cell=cell, case=case.id)
        engine = self._observations.engine(request)
        if not case.training.needs <= engine.capabilities:
            request = request.without_exercises()  # the calls do not affect whether a plan is refused
        not_run = f"needs {lacks}, which this world lacks" if lacks else ""
        if richer := sorted(case.unless & engine.capabilities, key=attrgetter("name")):
            not_run = f"engines that declare {richer[0].name} have such cases of their own"
        try:
            found = _not_run(not_run, self._effort.seed) if not_run else self._judged(case, request, engine)
        except Exception as error:  # any other error here is the harness's, and must not stop the other cases
            if isinstance(error, LostHostError) or (
                isinstance(error, UsageError) and not self._is_fresh(error)
            ):
                raise
            fault = machine_fault(error)
            headline = str(fault) if fault else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            found = _Judged(
                judgement=Judgement(verdict=Verdict.ERRORED, headline=headline), seed=self._effort.seed
            )
        self._last = (request, found)
        is_quiet = found.judgement.verdict in _QUIET
        if not is_quiet:
            self._observations.keep(request)
        judgement, under = found.judgement, f"under schedule {found.seed}: " if found.seed else ""
        return Record(
            engine=cell.engine,
            case=case.id,
            world=str(cell.world),
            verdict=judgement.verdict,
            headline=under + judgement.headline,
            suite=suite,
            engine_version=engine.version_on(cell.world.device),
            known_as=engine.known_as,
            known_version=engine.known_version,
            laws=judgement.laws,
            worst=judgement.worst,
            visible=judgement.visible,
            declared_zeros=judgement.declared_zeros,
            wrapper=found.wrapper,
            unreached=judgement.unreached,
            ledger=found.ledger,
            outcomes=judgement.outcomes,
            hang=judgement.hang,
            output=printed(self._observations.folder(request), name=LEFT_FILES if is_quiet else ANY_OUTPUT),
            observation="" if is_quiet and not self._keeps_all else self._observations.name(request),
            command=" ".join((command, *self._effort.options(found.seed))),
            duration_s=round(time.monotonic() - started, 4),
            needs=tuple(sorted(each.name for each in case.training.needs)),
        )

    def located(self) -> Located | None:
        """Name where the case that was just judged first went wrong, if values are wrong: trains it once more."""
        assert self._last is not None
        request, found = self._last
        is_wrong = any(law.law == MatchesOracle().name and not law.held for law in found.judgement.laws)
        watching = replace(request, training=probed(request.training))
        if (
            not self._effort.locates
            or not is_wrong
            or request.num_simulated
            or not self._observations.exist(watching)
        ):
            return None
        try:
            (again, *_) = self._observations.under((found.seed,), watching)
            limit_s = max(request.cell.world.deadline_s, _LEAST_FOR_ORACLE_S)
            folder = self._observations.folder(watching)
            return locate(watching, again.saved, folder, self._oracle(request), limit_s=limit_s)
        except Exception as error:  # it only explains: an error of its own must not hide the verdict
            if isinstance(error, LostHostError):
                raise
            return Located(sentence=f"not located: {type(error).__name__}: {error}")

    def _is_fresh(self, error: UsageError) -> bool:
        """Whether this session wrote a file that cannot be read."""
        return isinstance(error, UnreadableError) and not self._is_replay

    def close(self) -> None:
        """End pooled worlds."""
        self._observations.close()

    def _judged(self, case: Case, request: Request, engine: EngineDescription) -> _Judged:
        """Judge the observations of each schedule; returns the first that did not pass, else the first."""
        training, world = request.training, request.cell.world
        declared, lacks = engine.capabilities, engine.lacks_in(world)
        oracle = self._oracle(request)
        found: list[_Judged] = []
        for seed, saved in self._observations.under(self._effort.seeds(training, world), request):
            judged = partial(
                judge, case, declared, saved, oracle, lacks=lacks, simulated=request.num_simulated
            )
            judgement = judged()
            # See [Note: what a kept oracle may decide].
            must_explain = any(not law.held for law in judgement.laws)
            is_passed = judgement.verdict is Verdict.PASSED
            if not is_passed and self._oracles.forget(request, must_explain=must_explain):
                judgement = judged()
            if _is_unexplained(judgement, request):
                judgement = self._explained(judgement, case, request, seed, declared)
            is_of_before = training.origin is not None and len(saved.result.outcomes) != world.size
            if is_of_before and judgement.verdict is not Verdict.UNSUPPORTED:
                where = f"in the world before, of {len(saved.result.outcomes)} rank(s): "
                judgement = replace(judgement, headline=where + judgement.headline)
            ledger = summarize(saved.ledgers_by_rank)
            found.append(_Judged(judgement=judgement, seed=seed, ledger=ledger, wrapper=saved.wrapper))
            if judgement.verdict is not Verdict.PASSED:
                break
        return found[-1] if found[-1].judgement.verdict is not Verdict.PASSED else found[0]

    def _oracle(self, request: Request) -> Callable[[], OracleObservation]:
        world = request.cell.world
        limit_s = max(world.deadline_s, _LEAST_FOR_ORACLE_S)
        return lambda: replace(self._oracles.oracle(request, limit_s=limit_s), device=world.device)

    def _explained(
        self, judgement: Judgement, case: Case, request: Request, seed: int, declared: frozenset[Capability]
    ) -> Judgement:
        """Train once more under the read watch, and add which code read values before they arrived."""
        training = request.training
        watched = replace(training, watch=training.watch | {Watch.RACES}, schedules=1)
        watching = replace(request, training=watched)
        if not self._observations.exist(watching):
            return judgement
        self._observations.keep(watching)
        (again, *_) = self._observations.under((seed,), watching)
        of_the_watch = replace(case, training=watched, laws=())  # only its laws are judged again
        second = judge(of_the_watch, declared, again.saved, self._oracle(request))
        races = [law for law in second.laws if law.law == NoRaces().name and not law.held]
        if not races:
            return judgement
        summaries = "; ".join(law.summary for law in races)
        return replace(
            judgement, headline=f"{judgement.headline}; {summaries}", laws=(*judgement.laws, *races)
        )


def _not_run(why: str, seed: int) -> _Judged:
    judgement = Judgement(verdict=Verdict.UNSUPPORTED, headline=f"{why}; not run")
    return _Judged(judgement=judgement, seed=seed)


def _is_unexplained(judgement: Judgement, request: Request) -> bool:
    """Whether a value may be non-finite because it was read before it arrived, and reads were not watched."""
    is_poisoned = judgement.worst is not None and judgement.worst.looks_like == NOT_FINITE
    is_in_threads = request.cell.world.kind is WorldKind.THREADS
    return is_poisoned and is_in_threads and Watch.RACES not in request.training.watch
