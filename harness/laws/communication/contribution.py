"""The law that gradients cross between ranks: so many bytes leave them in each step, whatever is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.oracle.oracle_observation import Quantity
from shardproof.harness.records.tensor_file import dtype_of
from shardproof.harness.tracing.ledger import Entry, Op, Phase

# In these a rank hands its own values to others, who combine them.
_COMBINING = frozenset({Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE, Op.ALL_TO_ALL, Op.GATHER, Op.SEND})
_AFTER_FORWARD = frozenset({Phase.BACKWARD, Phase.BETWEEN, Phase.STEP})


@dataclass(frozen=True, slots=True, kw_only=True)
class SendsItsGradients:
    """In each step the ranks hand out as many bytes of their own as averaging the gradients needs, or more.

    Of R ranks with data, each has a term of every element of a gradient. Wherever an element is summed, the terms of
    R - 1 ranks come from elsewhere, so (R - 1) times the bytes of all gradients leave ranks, in whichever collectives.
    A collective that combines counts with all that a rank puts into it, and so does a gather after the forward, which
    may bring the terms to each rank. An engine with right values and less traffic has them from somewhere else: from
    files, from memory that ranks share, or from a rank that computes with the data of all.
    """

    name: str = "gradients cross between the ranks"

    def judge(self, evidence: Evidence) -> Ruling:
        """Add up the bytes of all ranks, step by step."""
        broken, ratios = [], list[float]()
        for step, seen in enumerate(evidence.oracle.steps):
            needed = self._needed(evidence, step)
            sent = max(_sent(evidence, step, _COMBINING), _sent(evidence, step, {Op.ALL_GATHER}))
            if needed:
                ratios.append(sent / needed)
            if sent < needed:
                num = sum(gradient is not None for gradient in seen.gradients.values())
                broken.append(
                    f"step {step}: expected at least {needed} bytes out of {evidence.data_size} ranks to average "
                    f"{num} gradients, got {sent}; values that do not cross in collectives come from elsewhere"
                )
        least = (
            f"at least {min(ratios):.2f} x the fewest bytes in each step"
            if ratios
            else "one rank has all data"
        )
        return rule(self.name, broken, held=least)

    def _needed(self, evidence: Evidence, step: int) -> int:
        if evidence.training.schedule.is_skipped(step):
            return 0
        dtype, oracle = evidence.training.plan.reduction_dtype, evidence.oracle
        num_bytes = sum(
            gradient.numel() * (dtype or oracle.dtype(Quantity.GRADIENT, name)).itemsize
            for name, gradient in oracle.steps[step].gradients.items()
            if gradient is not None
        )
        return (evidence.data_size - 1) * num_bytes


def _sent(evidence: Evidence, step: int, ops: Iterable[Op]) -> int:
    return sum(
        _contributed(entry)
        for observation in evidence.ranks
        for entry in observation.ledger
        if entry.step == step and entry.op in ops and entry.phase in _AFTER_FORWARD and len(entry.group) > 1
    )


def _contributed(entry: Entry) -> int:
    return sum(map(prod, entry.shapes)) * dtype_of(entry.dtype).itemsize
