"""The law over the census that needs no layout: what a rank holds beside what it shows does not become more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.harness.cases.training import Training
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.laws.memory.share import counted
from shardproof.harness.records.observation import Observation
from shardproof.harness.tracing.memory.memory_report import CensusTime


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavesNothingBehind:
    """After a backward or an update a rank holds no more beside its gradients and state than it did before.

    Parameters, buffers of the engine and its other memory stay as large as after the first update. Gradients and
    optimizer state may become more, as when a part of the model thaws, because the engine shows them. Gradients that
    are None are compared apart: an engine may keep the memory in which it reduces them. So outputs that an engine
    keeps until a step, and gradients that it keeps after a step that it skips, are more; what is made and freed between
    two counts is not seen.
    """

    name: str = "no step leaves memory behind"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare each count with the fewest bytes before it, on every rank."""
        broken = [
            f"rank {observation.rank}, {breach}"
            for observation in evidence.ranks
            for breach in _breaches(evidence.training, observation)
        ]
        num_counts = len([c for o in evidence.ranks for c in o.counts if c.beside_bytes is not None])
        return rule(self.name, broken, held=f"at {num_counts} moments")


def _breaches(training: Training, observation: Observation) -> Iterator[str]:
    fewest: dict[bool, int] = {}  # by whether gradients are None
    for count in counted(training, observation):
        if count.beside_bytes is None:
            continue
        has_none = count.moment is CensusTime.CLEARED and training.schedule.clears_to_none(count.step)
        most = fewest.setdefault(has_none, count.beside_bytes)
        fewest[has_none] = min(most, count.beside_bytes)
        if count.beside_bytes > most:
            since = "; ".join(map(str, count.since))
            yield (
                f"step {count.step}, {count.moment}: expected at most {most} bytes beside gradients and optimizer "
                f"state, as before, got {count.beside_bytes}; since then: {since}"
            )
