"""A wrong shard with all that could explain it, and a defect in words with the tensor that it would make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardproof.engine.contract import Shard
from shardproof.harness.cases.training import Clip
from shardproof.harness.laws.law import Evidence
from shardproof.harness.oracle.absolute_error import deviation, largest
from shardproof.harness.oracle.oracle_observation import OracleObservation, OracleStep, Quantity, TensorKey
from shardproof.harness.torch_compat.dtypes import widened

# A hypothesis must fit this many times better than the error it explains; otherwise a small defect would fit similar
# hypotheses.
MUST_EXPLAIN = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A defect in words, and the tensor that it would produce."""

    text: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suspect:
    """A wrong shard with all inputs of hypotheses.

    ``rank`` counts only ranks with data of their own; ``own`` are the shards of the parameters that the rank holds.
    ``error`` is the deviation of ``got`` from ``expected``, ``allowed`` the largest that noise explains.
    """

    evidence: Evidence
    place: TensorKey
    rank: int
    shard: Shard
    own: Mapping[str, Shard]
    got: torch.Tensor
    expected: torch.Tensor
    error: torch.Tensor
    allowed: float

    @property
    def oracle(self) -> OracleObservation:
        """The oracle of the training."""
        return self.evidence.oracle

    @property
    def at(self) -> OracleStep:
        return self.oracle.steps[self.place.step]

    @property
    def clip(self) -> Clip | None:
        """How gradients are clipped before each step."""
        return self.evidence.training.schedule.clip

    @property
    def contributions(self) -> torch.Tensor | None:
        """The gradient's pieces [microbatches, ranks, ...] of this shard; None where no loss reaches the parameter."""
        pieces = self.at.contributions.get(self.place.name)
        return None if pieces is None else widened(self.shard.of(pieces))

    @property
    def is_beyond(self) -> torch.Tensor:
        """The elements that noise does not explain."""
        return self.error > self.allowed

    @property
    def whole(self) -> torch.Tensor | None:
        """The reference of the whole tensor."""
        full = self.oracle.reference(self.place.quantity, self.place.step, self.rank).get(self.place.name)
        return None if full is None else widened(full)

    def earlier(self, step: int) -> torch.Tensor | None:
        """Return this quantity's reference after an earlier step, -1 being the initial value."""
        is_parameter = self.place.quantity is Quantity.PARAMETER
        if step < 0 and not is_parameter:
            return None
        quantity = Quantity.INITIAL if step < 0 else self.place.quantity
        full = self.oracle.reference(quantity, step, self.rank).get(self.place.name)
        return None if full is None else widened(self.shard.of(full))

    def fits(self, hypothesis: torch.Tensor, *, in_part: bool = False) -> bool:
        """Whether ``got`` is the hypothesis up to noise, because of the elements that the defect changes.

        ``in_part`` compares only the wrong elements.
        """
        if not self.got.numel():
            return False
        growth = max(1.0, largest(hypothesis) / max(largest(self.expected), torch.finfo(torch.float64).tiny))
        rounding = 16 * torch.finfo(torch.float32).eps * largest(hypothesis)
        slack = max(2 * self.allowed * min(growth, 1e3), rounding)
        distances = deviation(self.got, hypothesis)
        distance = (distances[self.is_beyond] if in_part else distances).max().item()
        return distance <= slack and distance * MUST_EXPLAIN <= self.error.max().item()


def factor_between(got: torch.Tensor, expected: torch.Tensor) -> complex | None:
    """Return the f that brings f x expected closest to got; None for one element, which would fit any f."""
    square = expected.abs().square().sum().item()
    if expected.count_nonzero() < 2 or not math.isfinite(square) or square == 0:
        return None
    factor = (got * expected.conj()).sum().item() / square
    return factor if math.isfinite(abs(factor)) else None
