"""The law of how much of the model a rank may hold between steps: all of it, or its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.contract import Layout, Shard
from harness.law import Evidence, Ruling
from harness.record import LawRecord

__all__ = ["HoldsItsShare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsItsShare:
    """After each step every rank holds of each parameter what the plan's layout says, no more.

    Replicated: the whole. Sharded over S ranks: at most ceil(n / S) of the n slices along some dim. Numbers
    cannot show this: an engine that drops the request to shard still trains the same model.
    """

    name: str = "holds its share"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at every parameter on every rank after every step."""
        broken = [*_beyond(evidence)]
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            record = LawRecord(
                law=self.name, held=False, summary=broken[0] + more, details=tuple(broken[1:8])
            )
            return Ruling(record=record)
        num_shares = _num_shares(evidence)
        held = (
            "every parameter whole"
            if num_shares == 1
            else f"at most 1/{num_shares} of each parameter, rounded up"
        )
        return Ruling(
            record=LawRecord(law=self.name, held=True, summary=f"{held}, on {evidence.world_size} ranks")
        )


def _num_shares(evidence: Evidence) -> int:
    match evidence.training.plan.layout:
        case Layout.SHARD:
            return evidence.world_size
        case Layout.HYBRID:
            return evidence.training.plan.axes(evidence.world_size)[-1].size
        case Layout.REPLICATE:
            return 1
        case Layout.NATIVE:
            raise ValueError("HoldsItsShare: expected a plan that names a layout, got Layout.NATIVE")


def _beyond(evidence: Evidence) -> Iterator[str]:
    num_shares = _num_shares(evidence)
    for observation in evidence.ranks:
        for step, seen in enumerate(observation.steps):
            for name, shard in seen.parameters.items():
                if not _is_share(shard, num_shares):
                    yield (
                        f"step {step}, rank {observation.rank}, parameter {name}: expected 1/{num_shares} of "
                        f"{list(shard.global_shape)}, got {list(shard.tensor.shape)}"
                    )


def _is_share(shard: Shard, num_shares: int) -> bool:
    if num_shares == 1:
        return shard.is_whole
    local, whole = shard.tensor.shape, shard.global_shape
    return any(
        mine <= -(-size // num_shares) and local[:dim] == whole[:dim] and local[dim + 1 :] == whole[dim + 1 :]
        for dim, (mine, size) in enumerate(zip(local, whole, strict=True))
    )
