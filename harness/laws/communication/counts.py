"""Laws over communication between ranks: counts, bytes, order, dtypes, waits; each checks every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shardproof.harness.laws.communication.bounds import (
    Amount,
    Bound,
    at,
    blindness,
    evaluate,
    ledgers,
    pick,
    when,
)
from shardproof.harness.laws.communication.select import NOT_THE_ENGINES, LoopStep, Per, Select
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.tracing.ledger import Entry, Ledger, Phase

__all__ = [
    "AllWaited",
    "Asynchronous",
    "Bytes",
    "Count",
    "Dtype",
    "FewCalls",
    "InOrder",
    "Nothing",
    "OnlyThese",
    "ReadsAreSilent",
    "ReduceOps",
]

_MAX_ENTRIES = 6  # enough to show a pattern; a whole ledger would hide it


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The number of collectives in each microbatch or step, on each rank."""

    select: Select
    expected: Bound
    per: Per = Per.MICROBATCH

    @property
    def name(self) -> str:
        return f"{self.expected} x {self.select} per {self.per.value}"

    def judge(self, evidence: Evidence) -> Ruling:
        tally = _Tally(select=self.select, per=self.per, measure=len, noun="collectives")
        broken = [*blindness(evidence, (self.select,), self.per), *tally.breaches(evidence, self.expected)]
        return rule(self.name, broken, held=f"{tally.spell(evidence)} on every rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """The number of bytes in each microbatch or step, on each rank, beside the theoretical ``minimum``."""

    select: Select
    expected: Bound
    minimum: Amount
    per: Per = Per.MICROBATCH

    @property
    def name(self) -> str:
        return f"{self.expected} bytes of {self.select} per {self.per.value}"

    def judge(self, evidence: Evidence) -> Ruling:
        tally = _Tally(select=self.select, per=self.per, measure=_num_bytes, noun="bytes")
        ratio = self._ratio(max(tally.amounts(evidence), default=0), evidence)
        broken = [*blindness(evidence, (self.select,), self.per), *tally.breaches(evidence, self.expected)]
        if broken:
            broken.append(f"at worst {ratio}")
        return rule(self.name, broken, held=f"{tally.spell(evidence)} on every rank, {ratio}")

    def _ratio(self, worst: int, evidence: Evidence) -> str:
        minimum = evaluate(self.minimum, evidence.training, evidence.world_size)
        ratio = f"{worst / minimum:.3f} x" if minimum else f"{worst} beyond"
        return f"{ratio} the theoretical minimum of {minimum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FewCalls:
    """The maximum number of collectives in the whole training, preparation included, on each rank."""

    at_most: Amount

    @property
    def name(self) -> str:
        amount = self.at_most
        return f"at most {amount if isinstance(amount, int) else amount.name} collectives in all"

    def judge(self, evidence: Evidence) -> Ruling:
        limit = evaluate(self.at_most, evidence.training, evidence.world_size)
        counts = {
            rank: sum(e.phase not in NOT_THE_ENGINES for e in found) for rank, found in ledgers(evidence)
        }
        broken = [
            f"rank {rank}: expected at most {limit} collectives in all, got {counts[rank]}; "
            f"{most} of them {entry.op} in {entry.phase} at {entry.site}"
            for rank, found in ledgers(evidence)
            if counts[rank] > limit
            for entry, most in [_most_frequent(found)]
        ]
        broken = [*blindness(evidence, (), Per.STEP), *broken]
        return rule(self.name, broken, held=f"at most {max(counts.values(), default=0)} of {limit} on a rank")


def _most_frequent(ledger: Ledger) -> tuple[Entry, int]:
    """Return the first call of the most frequent kind, and its count."""
    kinds = Counter((e.op, e.phase, e.site) for e in ledger)
    kind, most = kinds.most_common(1)[0]
    return next(e for e in ledger if (e.op, e.phase, e.site) == kind), most


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """No collective of this kind; also fails when no entry at all was observed."""

    select: Select

    @property
    def name(self) -> str:
        return f"no {self.select}"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = blindness(evidence, (self.select,), Per.STEP)
        for rank, ledger in ledgers(evidence):
            broken += [
                f"rank {rank} {when(e)}: expected none, got {e.describe()}"
                for e in pick(self.select, ledger, evidence)
            ]
        seen = sum(len(ledger) for _, ledger in ledgers(evidence))
        return rule(self.name, broken, held=f"none among {seen} collectives")


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder:
    """In each microbatch every collective of a selection is issued before any of the next selection.

    A microbatch in which one of the selections finds no entry breaks the law. Microbatches that some selection does not
    cover are left out.
    """

    selects: tuple[Select, ...]

    @property
    def name(self) -> str:
        return " before ".join(map(str, self.selects))

    def judge(self, evidence: Evidence) -> Ruling:
        schedule = evidence.training.schedule
        broken = blindness(evidence, self.selects, Per.MICROBATCH)
        covered = [set(s.moments(schedule, Per.MICROBATCH)) for s in self.selects]
        moments = sorted(set.intersection(*covered), key=lambda m: (m.step, m.microbatch))
        if not moments and not broken:
            broken.append("expected a microbatch that all selections cover, got none")
        for rank, ledger in ledgers(evidence):
            for moment in moments:
                issued = [at(moment, pick(s, ledger, evidence)) for s in self.selects]
                if any(issued) or evidence.world_size > 1:
                    broken += [f"rank {rank} {moment}: {text}" for text in self._disorder(issued)]
        return rule(self.name, broken, held=f"in order on every rank in {len(moments)} microbatches")

    def _disorder(self, issued: Sequence[Ledger]) -> Iterator[str]:
        for select, entries in zip(self.selects, issued, strict=True):
            if not entries:
                yield f"expected {select}, got none"
        for before, after in pairwise(issued):
            if before and after and before[-1].seq > after[0].seq:
                yield f"expected {before[-1].describe()} first, got it after {after[0].describe()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyThese:
    """Only entries that one of the selections picks; ``among`` limits the entries checked."""

    selects: tuple[Select, ...]
    among: Select = field(default_factory=Select)

    @property
    def name(self) -> str:
        return f"only {'; '.join(map(str, self.selects))} among {self.among}"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = blindness(evidence, (self.among,), Per.STEP)
        num_allowed = 0
        for rank, ledger in ledgers(evidence):
            asked = pick(self.among, ledger, evidence)
            allowed = {e.seq for s in self.selects for e in pick(s, asked, evidence)}
            num_allowed += len(allowed)
            broken += [
                f"rank {rank} {when(e)}: left over {e.describe()}" for e in asked if e.seq not in allowed
            ]
        return rule(self.name, broken, held=f"nothing left over beside {num_allowed} collectives")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadsAreSilent:
    """Reads of the harness do not communicate: otherwise an engine could synchronise only when it is read."""

    name: str = "reads are silent"

    def judge(self, evidence: Evidence) -> Ruling:
        """Find the calls that ranks issued while they were read."""
        broken = [
            f"rank {o.rank}, {when(e)}: the adapter communicated while it was read: {e.describe()}"
            for o in evidence.ranks
            for e in o.ledger
            if e.phase is Phase.OBSERVE
        ]
        return rule(self.name, broken, held=f"on all {evidence.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class _EachSelected:
    """Judges each selected collective separately; a rank with none selected breaks the law unless it is alone."""

    select: Select

    @property
    def name(self) -> str:
        raise NotImplementedError

    def breach(self, entry: Entry) -> str | None:
        """Describe the fault of a collective; None where there is none."""
        raise NotImplementedError

    def judge(self, evidence: Evidence) -> Ruling:
        broken = blindness(evidence, (self.select,), Per.STEP)
        num_looked_at = 0
        for rank, ledger in ledgers(evidence):
            picked = pick(self.select, ledger, evidence)
            num_looked_at += len(picked)
            if not picked and evidence.world_size > 1:
                broken.append(f"rank {rank}: expected {self.select}, got none")
            for entry in picked:
                text = self.breach(entry)
                if text is not None:
                    broken.append(f"rank {rank} {when(entry)}: {text} in {entry.describe()}")
        return rule(self.name, broken, held=f"all {num_looked_at} collectives do")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype(_EachSelected):
    """Every selected collective of floats carries this dtype, spelt as in ``float32``; integers are bookkeeping."""

    dtype: str

    @property
    def name(self) -> str:
        return f"{self.select} carries {self.dtype}"

    def breach(self, entry: Entry) -> str | None:
        is_wrong = "float" in entry.dtype and entry.dtype != self.dtype
        return f"expected {self.dtype}, got {entry.dtype}" if is_wrong else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceOps(_EachSelected):
    """Every selected collective reduces with one of these, spelt as in ``sum``, ``avg``."""

    allowed: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.select} reduces with {'/'.join(self.allowed)}"

    def breach(self, entry: Entry) -> str | None:
        wanted = "/".join(self.allowed)
        return None if entry.reduce_op in self.allowed else f"expected {wanted}, got {entry.reduce_op}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous(_EachSelected):
    """Every selected collective is issued without blocking the rank, which waits for the result separately."""

    @property
    def name(self) -> str:
        return f"{self.select} is asynchronous"

    def breach(self, entry: Entry) -> str | None:
        return None if entry.is_async else "expected a call that returns at once, got one that blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWaited(_EachSelected):
    """Every selected result was waited for before the optimizer step of its step began.

    Collectives issued during the optimizer phase itself must be waited for within it.
    """

    @property
    def name(self) -> str:
        return f"{self.select} is waited for before the optimizer step"

    def breach(self, entry: Entry) -> str | None:
        wait = entry.wait
        if wait is None:
            return "the result was never waited for"
        if wait.step == entry.step and (wait.phase is not Phase.STEP or entry.phase is Phase.STEP):
            return None
        return f"expected a wait before the optimizer step, got one in {wait.phase} of step {wait.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tally:
    """Adds up the entries that a selection picks, for each moment that it covers."""

    select: Select
    per: Per
    measure: Callable[[Ledger], int]
    noun: str

    def amounts(self, evidence: Evidence) -> list[int]:
        """Return every amount, rank by rank, moment by moment."""
        return [self.measure(at(m, p)) for _, p in self._picked(evidence) for m in self._moments(evidence)]

    def breaches(self, evidence: Evidence, expected: Bound) -> Iterator[str]:
        """Yield every moment with an unexpected amount, and the entries outside all moments."""
        spelt = expected.spell(evidence.training, evidence.world_size)
        for rank, picked in self._picked(evidence):
            for moment in self._moments(evidence):
                entries = at(moment, picked)
                got = self.measure(entries)
                if not expected.allows(got, evidence.training, evidence.world_size):
                    seen = f"{got}{_by_unit(entries)}{_list(entries)}"
                    yield f"rank {rank} {moment}: expected {spelt} {self.noun}, got {seen}"
            strays = [e for e in picked if not any(m.holds(e) for m in self._moments(evidence))]
            if strays:
                where = f"outside the {self.per.value} counted"
                yield f"rank {rank}: expected none {where}, got {len(strays)}{_list(strays)}"

    def spell(self, evidence: Evidence) -> str:
        """Format the range of observed amounts."""
        amounts = self.amounts(evidence) or [0]
        low, high = min(amounts), max(amounts)
        return f"{low if low == high else f'{low} to {high}'} {self.noun} per {self.per.value}"

    def _picked(self, evidence: Evidence) -> Iterator[tuple[int, Ledger]]:
        for rank, ledger in ledgers(evidence):
            yield rank, pick(self.select, ledger, evidence)

    def _moments(self, evidence: Evidence) -> tuple[LoopStep, ...]:
        return self.select.moments(evidence.training.schedule, self.per)


def _num_bytes(entries: Ledger) -> int:
    return sum(e.num_bytes for e in entries)


def _by_unit(entries: Sequence[Entry]) -> str:
    """Name the units with more collectives than the others: those are communicated twice."""
    counts = Counter(e.unit for e in entries)
    fewest = min(counts.values(), default=0)
    if len(counts) > 1 and fewest > 1 and set(counts.values()) == {fewest}:
        return f", {fewest} of each unit"
    alone = len(counts) == 1
    often = [f"{n} of {_unit(unit)}" for unit, n in counts.items() if n > 1 and (n > fewest or alone)]
    return f", {', '.join(often[:_MAX_ENTRIES])}" if often else ""


def _unit(name: str | None) -> str:
    if name is None:
        return "no unit"
    return f"unit {name!r}" if name else "the root"


def _list(entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    more = f" and {len(entries) - _MAX_ENTRIES} more" if len(entries) > _MAX_ENTRIES else ""
    return ": " + "; ".join(f"{e.describe()} in {_unit(e.unit)}" for e in entries[:_MAX_ENTRIES]) + more
