"""Laws: conditions on an observed training. They take values and return a value; nothing here runs an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardproof.harness.cases.training import Training
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.observation import Observation
from shardproof.harness.records.record import LawRecord, TensorRecord

# Enough to show a pattern over ranks and microbatches; a whole ledger would hide it.
_MAX_DETAILS = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """The inputs of a law: every rank's observation, and the oracle's of the same training."""

    training: Training
    world_size: int
    ranks: tuple[Observation, ...]
    oracle: OracleObservation

    @property
    def data_size(self) -> int:
        """The number of ranks that have data of their own."""
        return self.training.plan.data_size(self.world_size)

    def data_rank(self, rank: int) -> int:
        """Return the index of a rank's data."""
        return self.training.plan.data_rank(rank, self.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The result of a law: its outcome, and the worst tensor if it compares tensors."""

    record: LawRecord
    worst: TensorRecord | None = None


class Law(Protocol):
    """One condition on an observed training."""

    @property
    def name(self) -> str:
        """Describe the law in a few words, with its parameters."""

    def judge(self, evidence: Evidence) -> Ruling:
        """Rule on the evidence; checks every rank."""


def rule(name: str, broken: Sequence[str], *, held: str) -> Ruling:
    """Return a ruling: the law holds, as ``held`` describes, unless ``broken`` contains a text."""
    if not broken:
        return Ruling(record=LawRecord(law=name, held=True, summary=held))
    more = len(broken) - 1
    summary = broken[0] + (f" (and {more} more)" if more else "")
    details = tuple(broken[:_MAX_DETAILS])
    if len(broken) > _MAX_DETAILS:
        details += (f"and {len(broken) - _MAX_DETAILS} more",)
    return Ruling(record=LawRecord(law=name, held=False, summary=summary, details=details))
