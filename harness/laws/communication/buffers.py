"""Laws over asynchronous collectives: each is waited for, and its buffers are untouched before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardproof.harness.cases.units import groups_of
from shardproof.harness.laws.communication.bounds import ledgers, when
from shardproof.harness.laws.communication.order import group_of, spell_unit
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.tracing.ledger import Entry, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavesBuffersAlone:
    """While a collective is in flight, its input is neither changed nor freed, and its output is not written to.

    Checked when the result is delivered: in worlds of threads, for asynchronous collectives.
    """

    name: str = "buffers are left alone"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = [text for rank, ledger in ledgers(evidence) for text in _harms(rank, ledger, evidence)]
        num_async = sum(e.is_async for _, ledger in ledgers(evidence) for e in ledger)
        return rule(self.name, broken, held=f"by {num_async} asynchronous collectives")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsAreWaitedFor:
    """Each asynchronous collective of a training is waited for before the training ends."""

    name: str = "results are waited for"

    def judge(self, evidence: Evidence) -> Ruling:
        broken = [
            f"rank {rank}, {when(e)}: no wait for {_spell(e, evidence)}"
            for rank, ledger in ledgers(evidence)
            for e in ledger
            if e.is_async and e.wait is None
        ]
        num_async = sum(e.is_async for _, ledger in ledgers(evidence) for e in ledger)
        return rule(self.name, broken, held=f"all {num_async} asynchronous ones")


def harm_in(ledgers: Sequence[Ledger]) -> str | None:
    """Return the first violation of a collective's buffers, which may explain how a world ended."""
    return next((text for rank, ledger in enumerate(ledgers) for text in _harms(rank, ledger)), None)


def _harms(rank: int, ledger: Ledger, evidence: Evidence | None = None) -> Iterator[str]:
    for entry in ledger:
        for harm in entry.harms:
            yield (
                f"rank {rank}, {when(entry)}: {harm.kind} before the wait at {harm.site}: {_spell(entry, evidence)}"
            )


def _spell(entry: Entry, evidence: Evidence | None) -> str:
    """Describe a collective: its kind, the turn that issued it, and the parameters of its size."""
    during = "" if entry.unit is None else f" in {entry.phase} of {spell_unit(entry.unit)}"
    if evidence is None:
        return f"{entry.describe()}{during}"
    group = group_of(entry, groups_of(evidence.training), evidence.world_size)
    whose = "" if group is None else f", of the size of {spell_unit(group.unit)}: {', '.join(group.names)}"
    return f"{entry.describe()}{during}{whose}"
