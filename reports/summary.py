"""Counts of verdicts, and the conclusion for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from shardproof.harness.records.proof import unjudged, unproven
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports.expected import stale
from shardproof.reports.verdict_style import MARKS

_LEAST_SHARE = 0.02  # of the records: other laws are about the one thing that a case is for


class Conclusion(Enum):
    """The result of a run as a whole."""

    CONFORMING = "Conforming"  # nothing but PASSED, UNSUPPORTED and KNOWN_FAILURE, and the run is whole
    NOT_CONFORMING = "Not conforming"  # some other verdict, or a stale expectation
    NOT_PROVEN = "Not proven"  # a check of a model that some engine was never seen to train
    INCOMPLETE = "Incomplete"  # no failure, but the run is not whole
    EMPTY = (
        "Nothing judged"  # no promise was judged, or none of an engine that can live in no world of the run
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of verdicts. The score is over what engines declare; what they do not declare is counted beside it."""

    counts: Mapping[Verdict, int]  # in the order of MARKS; only those that occur

    @property
    def total(self) -> int:
        """All records, whatever their verdict."""
        return sum(self.counts.values())

    @property
    def passed(self) -> int:
        """Records with the verdict PASSED."""
        return self.counts.get(Verdict.PASSED, 0)

    @property
    def declared(self) -> int:
        """Records whose engine declares what the plan needs."""
        return self.total - self.counts.get(Verdict.UNSUPPORTED, 0)

    @property
    def num_not_conforming(self) -> int:
        """The number of records that make a run exit with 1."""
        return sum(count for verdict, count in self.counts.items() if not verdict.is_conforming)

    @property
    def percent(self) -> str:
        """PASSED of the records that engines declare, rounded down: 100% means all."""
        return f"{self.passed * 1000 // self.declared / 10:.1f}%" if self.declared else "0.0%"

    @property
    def opted_out(self) -> str:
        """The number of records that no engine declares, in words; empty if there is none."""
        others = self.total - self.declared
        return f"{others} not declared" if others else ""

    @property
    def score(self) -> str:
        beside = f", {self.opted_out}" if self.opted_out else ""
        return f"{self.passed} of {self.declared} declared passed ({self.percent}){beside}"

    @property
    def words(self) -> str:
        return ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items()) or "no records"


def tally(records: Iterable[Record]) -> Tally:
    """Count verdicts."""
    counter = Counter(record.verdict for record in records)
    return Tally(counts={verdict: counter[verdict] for verdict in MARKS if counter[verdict]})


def conclude(run: Run) -> Conclusion:
    """Return the result of the run; a run that is not whole, or has stale expectations, never conforms."""
    counted = tally(run.records)
    if counted.num_not_conforming or stale(run):
        return Conclusion.NOT_CONFORMING
    if unproven(run.header.options, run.records):
        return Conclusion.NOT_PROVEN
    if unjudged(run.records):
        return Conclusion.INCOMPLETE if warnings(run) else Conclusion.EMPTY
    return Conclusion.INCOMPLETE if warnings(run) else Conclusion.CONFORMING


def conforms(run: Run) -> bool:
    """Return whether the exit code is 0."""
    return conclude(run) is Conclusion.CONFORMING


def warnings(run: Run) -> tuple[str, ...]:
    """Return the reasons why the run is not whole; empty if it is."""
    interrupted = ("the run was interrupted: it has no footer, so cases may be missing",)
    unavailable = run.footer.unavailable if run.footer else {}
    missing = tuple(f"{engine} was not judged: {problem}" for engine, problem in sorted(unavailable.items()))
    return (interrupted if run.is_interrupted else ()) + missing + run.problems


def limited(run: Run) -> tuple[str, ...]:
    """Return for each engine which part of its cases a run of limited time judged, and of their power it had."""
    found = run.footer.powers if run.footer is not None else ()
    return tuple(
        f"{one.engine}: {one.num_ran} of {one.num_cases} cases, which kill {one.num_killed} of the {one.num_killable} "
        f"mutants that all of them kill ({one.num_killed * 100 // max(1, one.num_killable)}%)"
        for one in found
    )


def declared_zeros(run: Run) -> tuple[str, ...]:
    """Return for each engine that declares it how many gradients it showed as zeros where there are none."""
    found: dict[str, list[int]] = {}
    for record in run.records:
        if record.declared_zeros:
            found.setdefault(record.engine, []).append(record.declared_zeros)
    return tuple(
        f"{engine}: {sum(counts)} gradients in {len(counts)} records are zeros instead of None, as its adapter declares"
        for engine, counts in sorted(found.items())
    )


def laws_judged(run: Run) -> list[tuple[str, int, int]]:
    """Return each law with the number of records that it judged, and of records that have laws; rare laws left out."""
    judged = [record for record in run.records if record.laws]
    counted = Counter(law for record in judged for law in {law.law for law in record.laws})
    return [(law, n, len(judged)) for law, n in counted.most_common() if n >= _LEAST_SHARE * len(judged)]
