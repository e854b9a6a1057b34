"""The law of how much of the model a rank may hold between steps: all of it, or its share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from engine.contract import Layout, Shard
from harness.law import Evidence, Ruling
from harness.record import LawRecord

__all__ = ["HoldsItsShare"]

# Engines that lay parameters one after the other let each begin at a multiple of so many bytes.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsItsShare:
    """After each step every rank holds of each parameter what the plan's layout says, no more.

    Replicated, or ignored by the plan's word: the whole. Sharded over S ranks: at most ceil(n / S) of the n slices
    along some dim. Of flat pieces the sum alone is bounded, since one flattened group may put a whole parameter on
    one rank: over all parameters of which a rank shows flat pieces it holds at most the sum of ceil((n + a) / S),
    where a is what aligning a parameter can add to the n elements. That is enough for any grouping of them. Numbers
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
        of_what = "all parameters together" if _has_flat_pieces(evidence) else "each parameter"
        held = (
            "every parameter whole" if num_shares == 1 else f"at most 1/{num_shares} of {of_what}, rounded up"
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


def _has_flat_pieces(evidence: Evidence) -> bool:
    return any(s.is_flat for o in evidence.ranks for seen in o.steps for s in seen.parameters.values())


def _beyond(evidence: Evidence) -> Iterator[str]:
    num_shares = _num_shares(evidence)
    for observation in evidence.ranks:
        for step, seen in enumerate(observation.steps):
            where = f"step {step}, rank {observation.rank}"
            for name, shard in seen.parameters.items():
                shares = 1 if name in evidence.training.plan.ignored else num_shares
                if not _is_share(shard, shares):
                    yield (
                        f"{where}, parameter {name}: expected 1/{shares} of "
                        f"{list(shard.global_shape)}, got {list(shard.tensor.shape)}"
                    )
            if num_shares > 1 and (excess := _excess(seen.parameters, num_shares)) is not None:
                yield f"{where}: {excess}"


def _is_share(shard: Shard, num_shares: int) -> bool:
    if (
        num_shares == 1 or not shard.global_shape
    ):  # a single number has no slices: its share is rounded up to it
        return shard.is_whole
    if shard.is_flat:
        return True  # bounded in sum
    local, whole = shard.tensor.shape, shard.global_shape
    return any(
        mine <= -(-size // num_shares) and local[:dim] == whole[:dim] and local[dim + 1 :] == whole[dim + 1 :]
        for dim, (mine, size) in enumerate(zip(local, whole, strict=True))
    )


def _excess(parameters: Mapping[str, Shard], num_shares: int) -> str | None:
    flat = [shard for shard in parameters.values() if shard.is_flat]
    most = sum(-(-_aligned_numel(shard) // num_shares) for shard in flat)
    held = sum(shard.tensor.numel() for shard in flat)
    if held <= most:
        return None
    numel = sum(prod(shard.global_shape) for shard in flat)
    return f"expected at most {most} elements, 1/{num_shares} of the {numel} of all flattened parameters, got {held}"


def _aligned_numel(shard: Shard) -> int:
    return prod(shard.global_shape) + (_ALIGNMENT_BYTES - 1) // shard.tensor.itemsize
