"""Judges the cases of a session: from case, engine and world to a record, under every requested schedule."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from shardproof.engine.contract import Capability
from shardproof.harness.cases.training import Training, Watch
from shardproof.harness.errors import LostHostError, UnreadableError, UsageError
from shardproof.harness.laws.diagnosis import NOT_FINITE
from shardproof.harness.laws.runtime import NoRaces
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.ledger_summary import summarize
from shardproof.harness.records.record import LedgerLine, Record, Verdict
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.engines import EngineDescription
from shardproof.harness.runner.observation_cache import ObservationCache, Source, unexercised
from shardproof.harness.runner.options import Keep, RunOptions
from shardproof.harness.verdicts.case import Case
from shardproof.harness.verdicts.judgement import Judgement, judge
from shardproof.harness.worlds.output import printed
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
        self._observations = ObservationCache(source)
        self._keeps_all = source.is_replay or source.keep is Keep.ALL

    def run(self, case: Case, cell: Cell, *, suite: str, command: str, lacks: str = "") -> Record:
        """Judge one case in one cell; the harness's own errors become the verdict ERRORED, the caller's are raised.

        If the world ``lacks`` something that the case needs, the case is not run. Raises UnreadableError if
        observations are only read again, and these cannot be read.
        """
        started = time.monotonic()
        training = self._effort.applied(case.training)
        engine = self._observations.engine(training, cell, case.id)
        case = replace(case, training=training)
        if not training.needs <= engine.capabilities:
            training = unexercised(training)  # the calls do not affect whether a plan is refused
        try:
            found = (
                _unsupported(lacks, self._effort.seed)
                if lacks
                else self._judged(case, training, cell, engine)
            )
        except Exception as error:  # any other error here is the harness's, and must not stop the other cases
            if isinstance(error, LostHostError) or (
                isinstance(error, UsageError) and not self._is_fresh(error)
            ):
                raise
            headline = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            found = _Judged(
                judgement=Judgement(verdict=Verdict.ERRORED, headline=headline), seed=self._effort.seed
            )
        is_quiet = found.judgement.verdict in _QUIET
        if not is_quiet:
            self._observations.want(training, cell, case.id)
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
            output="" if is_quiet else printed(self._observations.folder(training, cell, case.id)),
            observation=""
            if is_quiet and not self._keeps_all
            else self._observations.name(training, cell, case.id),
            command=" ".join((command, *self._effort.options(found.seed))),
            duration_s=round(time.monotonic() - started, 4),
        )

    def _is_fresh(self, error: UsageError) -> bool:
        """Whether this session wrote a file that cannot be read."""
        return isinstance(error, UnreadableError) and not self._observations.is_replay

    def close(self) -> None:
        """End pooled worlds."""
        self._observations.close()

    def _judged(self, case: Case, training: Training, cell: Cell, engine: EngineDescription) -> _Judged:
        """Judge the observations of each schedule; returns the first that did not pass, else the first."""
        declared = engine.capabilities
        lacks = engine.lacks_in(cell.world)
        oracle = self._oracle(case, cell)
        found: list[_Judged] = []
        for seed, kept in self._observations.observations(
            training, cell, self._effort.seeds(training, cell.world), case.id
        ):
            judged = partial(judge, case, declared, kept, oracle, lacks=lacks, simulated=_num_simulated(cell))
            judgement = judged()
            # See [Note: what a kept oracle may decide].
            must_explain = any(not law.held for law in judgement.laws)
            if judgement.verdict is not Verdict.PASSED and self._observations.forget_oracle(
                case.training, _data_size(case, cell), case.id, must_explain=must_explain
            ):
                judgement = judged()
            if _is_unexplained(judgement, training, cell):
                judgement = self._explained(judgement, case, cell, seed, declared)
            is_of_before = training.origin is not None and len(kept.result.outcomes) != cell.world.size
            if is_of_before and judgement.verdict is not Verdict.UNSUPPORTED:
                where = f"in the world before, of {len(kept.result.outcomes)} rank(s): "
                judgement = replace(judgement, headline=where + judgement.headline)
            ledger = summarize(kept.ledgers_by_rank)
            found.append(_Judged(judgement=judgement, seed=seed, ledger=ledger, wrapper=kept.wrapper))
            if judgement.verdict is not Verdict.PASSED:
                break
        return found[-1] if found[-1].judgement.verdict is not Verdict.PASSED else found[0]

    def _oracle(self, case: Case, cell: Cell) -> Callable[[], OracleObservation]:
        data_size = _data_size(case, cell)
        limit_s = max(cell.world.deadline_s, _LEAST_FOR_ORACLE_S)
        device = cell.world.device
        return lambda: replace(
            self._observations.oracle(case.training, data_size, case.id, limit_s=limit_s), device=device
        )

    def _explained(
        self, judgement: Judgement, case: Case, cell: Cell, seed: int, declared: frozenset[Capability]
    ) -> Judgement:
        """Train once more under the read watch, and add which code read values before they arrived."""
        watched = replace(case.training, watch=case.training.watch | {Watch.RACES}, schedules=1)
        if not self._observations.holds(watched, cell, case.id):
            return judgement
        self._observations.want(watched, cell, case.id)
        (again, *_) = self._observations.observations(watched, cell, (seed,), case.id)
        asked = replace(case, training=watched, laws=())  # only the laws of the watch are judged again
        second = judge(asked, declared, again.kept, self._oracle(case, cell))
        races = [law for law in second.laws if law.law == NoRaces().name and not law.held]
        if not races:
            return judgement
        summaries = "; ".join(law.summary for law in races)
        return replace(
            judgement, headline=f"{judgement.headline}; {summaries}", laws=(*judgement.laws, *races)
        )


def _unsupported(lacks: str, seed: int) -> _Judged:
    headline = f"needs {lacks}, which this world lacks; not run"
    return _Judged(judgement=Judgement(verdict=Verdict.UNSUPPORTED, headline=headline), seed=seed)


def _data_size(case: Case, cell: Cell) -> int:
    return 1 if _num_simulated(cell) else case.training.plan.data_size(cell.world.size)


def _num_simulated(cell: Cell) -> int:
    return cell.world.size if cell.world.kind is WorldKind.SIMULATED else 0


def _is_unexplained(judgement: Judgement, training: Training, cell: Cell) -> bool:
    """Whether a value may be non-finite because it was read before it arrived, and reads were not watched."""
    is_poisoned = judgement.worst is not None and judgement.worst.looks_like == NOT_FINITE
    return is_poisoned and cell.world.kind is WorldKind.THREADS and Watch.RACES not in training.watch
