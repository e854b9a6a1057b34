"""The law that no more than so many collectives are in flight at once: issued, and not yet waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.laws.communication.bounds import Amount, evaluate
from harness.laws.communication.ruling import blindness, ledgers, pick, when
from harness.laws.communication.select import Per, Select
from harness.laws.law import Evidence, Ruling, rule
from harness.tracing.ledger import Entry, Ledger

__all__ = ["InFlight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Whenever a selected collective is issued, at most so many of them, itself included, are not waited for yet.

    A collective that blocks is waited for at once. What a rank holds for a collective, it holds at least until then.
    """

    select: Select
    at_most: Amount

    @property
    def name(self) -> str:
        """Say the law."""
        limit = self.at_most if isinstance(self.at_most, int) else self.at_most.name
        return f"at most {limit} x {self.select} in flight"

    def judge(self, evidence: Evidence) -> Ruling:
        """Count on every rank, call by call."""
        limit = evaluate(self.at_most, evidence.training, evidence.world_size)
        broken = blindness(evidence, (self.select,), Per.STEP)
        most = 0
        for rank, ledger in ledgers(evidence):
            picked = pick(self.select, ledger, evidence)
            if not picked and evidence.world_size > 1:
                broken.append(f"rank {rank}: expected {self.select}, got none")
            for entry, count in _counts(picked):
                most = max(most, count)
                if count > limit:
                    text = f"expected at most {limit} in flight, got {count}, the last of them"
                    broken.append(f"rank {rank} {when(entry)}: {text} {entry.describe()}")
        return rule(self.name, broken, held=f"at most {most} on every rank")


def _counts(picked: Ledger) -> Iterator[tuple[Entry, int]]:
    for position, entry in enumerate(picked):
        yield entry, sum(_is_under_way(e, entry.seq) for e in picked[: position + 1])


def _is_under_way(entry: Entry, seq: int) -> bool:
    """Tell whether ``entry`` was not waited for when call ``seq`` was made, itself among those issued by then."""
    wait = entry.wait
    # A ledger that does not tell when somebody waited proves no bound.
    return wait is None or wait.num_issued is None or wait.num_issued > seq
