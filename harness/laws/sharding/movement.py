"""The law that training reaches every row of a parameter, wherever it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.contract import Shard
from harness.laws.law import Evidence, Ruling
from harness.records.observation import Observation
from harness.records.record import LawRecord

__all__ = ["EveryRowMoves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryRowMoves:
    """After the last step no row of the parameter that a rank holds is what it was before the first."""

    parameter: str

    @property
    def name(self) -> str:
        """Say whose rows."""
        return f"every row of {self.parameter} moves"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at the rows of every rank; somebody must hold some."""
        broken, num_rows = [], 0
        for observation in evidence.ranks:
            still, held = self._still_rows(observation)
            num_rows += held
            if still:
                broken.append(f"rank {observation.rank}: row(s) {still} keep their initial values")
        if not num_rows:
            broken.append(f"expected rows of {self.parameter!r}, no rank holds any")
        summary = broken[0] if broken else f"{num_rows} rows on {evidence.world_size} ranks"
        return Ruling(
            record=LawRecord(law=self.name, held=not broken, summary=summary, details=tuple(broken))
        )

    def _still_rows(self, observation: Observation) -> tuple[list[int], int]:
        """Give the places of rows that did not move, and how many rows this rank holds at least a part of."""
        before = observation.initial.get(self.parameter)
        after = observation.steps[-1].parameters.get(self.parameter)
        if before is None or after is None or not before.tensor.numel():
            return [], 0
        moved = (before.tensor != after.tensor).flatten()
        rows = _rows_of_elements(before)
        held = set(rows.tolist())
        return sorted(held - set(rows[moved].tolist())), len(held)


def _rows_of_elements(shard: Shard) -> torch.Tensor:
    """Give the row in the whole of each element of a piece: int64[numel]."""
    if shard.is_flat:
        row_size = math.prod(shard.global_shape[1:])
        return torch.arange(shard.offsets[0], shard.offsets[0] + shard.tensor.numel()) // row_size
    num_rows = shard.tensor.shape[0]
    own = torch.arange(shard.offsets[0], shard.offsets[0] + num_rows)
    return own.repeat_interleave(shard.tensor.numel() // num_rows)
