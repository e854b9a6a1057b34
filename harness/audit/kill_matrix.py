"""The kill matrix: which cases killed which mutants, and whether that proves the cases. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from shardproof.harness.audit.marks import Idle, Pair, Selection
from shardproof.harness.records.record import Located, Record, Verdict

_OURS = frozenset({Verdict.ERRORED, Verdict.NOT_RUN})  # our own faults prove nothing about a mutant or a case


class MutantStatus(Enum):
    """The result of running one mutant on one case."""

    KILLED = "killed"  # the verdict is one that the mutant's defect must cause
    SURVIVED = "survived"  # any other verdict, also a crash of a mutant that should only compute wrongly
    REFUSED = "refused"  # the mutant's engine does not declare what the case needs, at least in this release
    UNKNOWN = "unknown"  # our own fault, or no verdict at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A mutant to kill; ``verdicts`` are those that kill it.

    ``trace`` names how its defect shows, ``phase`` where it begins.
    """

    name: str
    engine: str
    fault: str
    trace: str
    verdicts: tuple[str, ...]
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """The result of one pair; ``verdict`` is None if there is no record."""

    pair: Pair
    status: MutantStatus
    verdict: Verdict | None
    headline: str
    located: Located | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantRow:
    """One mutant and the cases that killed it."""

    target: Target
    killers: tuple[str, ...]
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMatrix:
    """Mutants by cases; ``is_whole`` is True if neither a suite's name nor a keyword deselected cases.

    If cases were deselected, a mutant counts only if a selected case names it. Mutants and cases do not count if all
    their pairs need a device that this machine lacks, or were refused.
    """

    targets: tuple[Target, ...]
    results: tuple[PairResult, ...]
    elsewhere: tuple[Pair, ...]
    idle: tuple[Idle, ...]
    is_whole: bool

    @property
    def mutants(self) -> tuple[MutantRow, ...]:
        """Every mutant that counts, in the order of the registry."""
        away = {pair.mutant for pair in self.elsewhere}
        rows = []
        for target in self.targets:
            results = [r for r in self.results if r.pair.mutant == target.name]
            killers = dict.fromkeys(r.pair.case for r in results if r.status is MutantStatus.KILLED)
            if results or (self.is_whole and target.name not in away):
                rows.append(MutantRow(target=target, killers=tuple(killers), num_pairs=len(results)))
        return tuple(rows)

    @property
    def cases(self) -> tuple[str, ...]:
        """Every case, including those without a pair."""
        return tuple(sorted({r.pair.case for r in self.results} | {idle.case for idle in self.idle}))

    @property
    def survivors(self) -> tuple[PairResult, ...]:
        """Mutants that a case names and did not kill."""
        return tuple(r for r in self.results if r.pair.must_kill and r.status is MutantStatus.SURVIVED)

    @property
    def refused(self) -> tuple[PairResult, ...]:
        """Pairs in which the mutant's engine rightly refused a case that names the mutant."""
        return tuple(r for r in self.results if r.pair.must_kill and r.status is MutantStatus.REFUSED)

    @property
    def unknown(self) -> tuple[PairResult, ...]:
        """Pairs without a verdict on the mutant: a fault of the harness."""
        return tuple(r for r in self.results if r.status is MutantStatus.UNKNOWN)

    @property
    def unkilled(self) -> tuple[Target, ...]:
        """Mutants that no case killed; of a selection of cases, those that it names."""
        named = {r.pair.mutant for r in self.results if r.pair.must_kill}
        refusing = _all_refused((r.pair.mutant, r) for r in self.results)
        rows = (row for row in self.mutants if not row.killers and row.target.name not in refusing)
        return tuple(row.target for row in rows if self.is_whole or row.target.name in named)

    @property
    def harmless(self) -> tuple[Idle, ...]:
        """Cases that killed no mutant, and so prove nothing yet."""
        killing = {r.pair.case for r in self.results if r.status is MutantStatus.KILLED}
        refused = _all_refused((r.pair.case, r) for r in self.results)
        whys = {idle.case: idle.why for idle in self.idle}
        return tuple(
            Idle(case=case, why=whys.get(case, "killed none of its mutants"))
            for case in self.cases
            if case not in killing and case not in refused
        )

    @property
    def is_proven(self) -> bool:
        """Whether every mutant was killed, every case killed one, and no mutant survived a case that names it."""
        return not (self.survivors or self.unknown or self.unkilled or self.harmless)


def kill_matrix(
    targets: Sequence[Target], selection: Selection, records: Iterable[Record], *, is_whole: bool
) -> KillMatrix:
    """Join what was selected with what was recorded."""
    by_key = {record.key: record for record in records}
    by_name = {target.name: target for target in targets}
    results = tuple(
        _result(pair, target, by_key.get((target.engine, pair.case, pair.world)))
        for pair in selection.pairs
        for target in (by_name[pair.mutant],)
    )
    return KillMatrix(
        targets=tuple(targets),
        results=results,
        elsewhere=selection.elsewhere,
        idle=selection.idle,
        is_whole=is_whole,
    )


def _all_refused(results: Iterable[tuple[str, PairResult]]) -> set[str]:
    """Return the keys of which every pair was refused."""
    statuses: dict[str, set[MutantStatus]] = {}
    for key, one in results:
        statuses.setdefault(key, set()).add(one.status)
    return {key for key, found in statuses.items() if found == {MutantStatus.REFUSED}}


def _result(pair: Pair, target: Target, record: Record | None) -> PairResult:
    if record is None:
        return PairResult(pair=pair, status=MutantStatus.UNKNOWN, verdict=None, headline="no record")
    if record.verdict in _OURS:
        status = MutantStatus.UNKNOWN
    elif record.verdict in target.verdicts:
        status = MutantStatus.KILLED
    else:
        status = MutantStatus.REFUSED if record.verdict is Verdict.UNSUPPORTED else MutantStatus.SURVIVED
    return PairResult(
        pair=pair, status=status, verdict=record.verdict, headline=record.headline, located=record.located
    )
