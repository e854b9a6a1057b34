"""The kill matrix: which mutants died on which cases, and whether that proves the cases. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from shardproof.harness.audit.marks import Idle, Pair, Selection
from shardproof.harness.records.record import Record, Verdict

_OURS = frozenset({Verdict.ERRORED, Verdict.NOT_RUN})  # they say nothing of the mutant, nor of the case


class MutantStatus(Enum):
    """What became of a mutant on a case."""

    KILLED = "killed"  # the verdict is one by which its sin shows
    SURVIVED = "survived"  # any other verdict, a crash of a mutant that should only be wrong included
    REFUSED = (
        "refused"  # the mutant's engine does not declare what the case needs, perhaps in this release alone
    )
    UNKNOWN = "unknown"  # our own fault, or no verdict at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A mutant to kill; ``verdicts`` are those that kill it, ``trace`` names why."""

    name: str
    engine: str
    sin: str
    trace: str
    verdicts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """What happened to one pair; ``verdict`` is None where there is no record."""

    pair: Pair
    fate: MutantStatus
    verdict: Verdict | None
    headline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantRow:
    """One mutant and the cases that killed it."""

    target: Target
    killers: tuple[str, ...]
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMatrix:
    """Mutants by cases; ``is_whole`` tells that no case was left out by a suite's name or a keyword.

    Where cases were left out, a mutant that none of the others names does not count; nor do the mutants and cases all
    of whose pairs need a device that is not here, or were refused.
    """

    targets: tuple[Target, ...]
    met: tuple[PairResult, ...]
    elsewhere: tuple[Pair, ...]
    idle: tuple[Idle, ...]
    is_whole: bool

    @property
    def mutants(self) -> tuple[MutantRow, ...]:
        """Every mutant that counts, in the order of the registry."""
        away = {pair.mutant for pair in self.elsewhere}
        rows = []
        for target in self.targets:
            met = [m for m in self.met if m.pair.mutant == target.name]
            killers = dict.fromkeys(m.pair.case for m in met if m.fate is MutantStatus.KILLED)
            if met or (self.is_whole and target.name not in away):
                rows.append(MutantRow(target=target, killers=tuple(killers), num_pairs=len(met)))
        return tuple(rows)

    @property
    def cases(self) -> tuple[str, ...]:
        """Every case, those that met no mutant included."""
        return tuple(sorted({m.pair.case for m in self.met} | {idle.case for idle in self.idle}))

    @property
    def survivors(self) -> tuple[PairResult, ...]:
        """Mutants that a case names and did not kill."""
        return tuple(m for m in self.met if m.pair.must_kill and m.fate is MutantStatus.SURVIVED)

    @property
    def refused(self) -> tuple[PairResult, ...]:
        """Mutants that a case names, and whose engines rightly refused it."""
        return tuple(m for m in self.met if m.pair.must_kill and m.fate is MutantStatus.REFUSED)

    @property
    def unknown(self) -> tuple[PairResult, ...]:
        """Pairs without a verdict on the mutant, which is our fault."""
        return tuple(m for m in self.met if m.fate is MutantStatus.UNKNOWN)

    @property
    def unkilled(self) -> tuple[Target, ...]:
        """Mutants that no case killed; of some cases only, those that these should have."""
        named = {m.pair.mutant for m in self.met if m.pair.must_kill}
        refusing = _all_refused((m.pair.mutant, m) for m in self.met)
        rows = (row for row in self.mutants if not row.killers and row.target.name not in refusing)
        return tuple(row.target for row in rows if self.is_whole or row.target.name in named)

    @property
    def harmless(self) -> tuple[Idle, ...]:
        """Cases that kill no mutant, and so prove nothing yet."""
        killing = {m.pair.case for m in self.met if m.fate is MutantStatus.KILLED}
        refused = _all_refused((m.pair.case, m) for m in self.met)
        whys = {idle.case: idle.why for idle in self.idle}
        return tuple(
            Idle(case=case, why=whys.get(case, "killed none that it met"))
            for case in self.cases
            if case not in killing and case not in refused
        )

    @property
    def is_proven(self) -> bool:
        """Whether every mutant died, every case killed, and no mutant survived a case that names it."""
        return not (self.survivors or self.unknown or self.unkilled or self.harmless)


def kill_matrix(
    targets: Sequence[Target], selection: Selection, records: Iterable[Record], *, is_whole: bool
) -> KillMatrix:
    """Join what was selected with what was recorded."""
    by_key = {(record.engine, record.case, record.world): record for record in records}
    by_name = {target.name: target for target in targets}
    met = tuple(
        _met(pair, target, by_key.get((target.engine, pair.case, pair.world)))
        for pair in selection.pairs
        for target in (by_name[pair.mutant],)
    )
    return KillMatrix(
        targets=tuple(targets),
        met=met,
        elsewhere=selection.elsewhere,
        idle=selection.idle,
        is_whole=is_whole,
    )


def _all_refused(met: Iterable[tuple[str, PairResult]]) -> set[str]:
    """Return the keys of which every pair was refused."""
    fates: dict[str, set[MutantStatus]] = {}
    for key, one in met:
        fates.setdefault(key, set()).add(one.fate)
    return {key for key, found in fates.items() if found == {MutantStatus.REFUSED}}


def _met(pair: Pair, target: Target, record: Record | None) -> PairResult:
    if record is None:
        return PairResult(pair=pair, fate=MutantStatus.UNKNOWN, verdict=None, headline="no record")
    if record.verdict in _OURS:
        fate = MutantStatus.UNKNOWN
    elif record.verdict in target.verdicts:
        fate = MutantStatus.KILLED
    else:
        fate = MutantStatus.REFUSED if record.verdict is Verdict.UNSUPPORTED else MutantStatus.SURVIVED
    return PairResult(pair=pair, fate=fate, verdict=record.verdict, headline=record.headline)
