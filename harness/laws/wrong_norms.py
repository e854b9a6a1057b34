"""Named defects of a norm: whose gradients it is of, when, and how it was put together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shardproof.harness.laws.suspect import Hypothesis, Suspect


def of_norm(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield the norms of other steps, ranks and moments, and wrong sums of powers."""
    for step in reversed(range(suspect.place.step)):
        before = suspect.earlier(step)
        if before is not None:
            yield Hypothesis(text=f"the norm of step {step} (stale)", tensor=before)
    if suspect.clip is None:
        return
    order, expected = suspect.clip.norm_type, suspect.expected
    for whose, norm in partial_norms(suspect, order):
        yield Hypothesis(text=f"the norm of {whose}", tensor=torch.full_like(expected, norm))
    schedule = suspect.evidence.training.schedule
    if schedule.scaling is not None:
        scale = schedule.loss_scale(suspect.place.step)
        yield Hypothesis(text="the norm of gradients that are still scaled", tensor=expected * scale)
        yield Hypothesis(text="the norm of gradients that were unscaled twice", tensor=expected / scale)
    clipped = _norm([g for g in suspect.at.gradients.values() if g is not None], order)
    yield Hypothesis(text="the norm after clipping", tensor=torch.full_like(expected, clipped))
    if math.isinf(order):
        return
    for size in range(2, suspect.oracle.world_size + 1):
        if suspect.oracle.world_size % size == 0:
            factor, root = size ** (1 / order), f"{size}^(1/{order:g})"
            text = f"{root} x the reference: each element is counted {size} times"
            yield Hypothesis(text=text, tensor=expected * factor)
            text = f"the reference / {root}: the powers are averaged over {size} ranks, not added"
            yield Hypothesis(text=text, tensor=expected / factor)
    yield Hypothesis(text="the sum of the powers, without the root", tensor=expected**order)
    parts = [_norm([whole], order) for whole in _unclipped(suspect).values()]
    text = "the sum of the parameters' norms"
    yield Hypothesis(text=text, tensor=torch.full_like(expected, sum(parts)))
    text = f"the squares of the parameters' norms added up, to the power of 1/{order:g}"
    squares = sum(part**2 for part in parts) ** (1 / order)
    yield Hypothesis(text=text, tensor=torch.full_like(expected, squares))


def partial_norms(suspect: Suspect, order: float) -> Iterator[tuple[str, float]]:
    """Yield partial norms that a rank may use for that of all gradients, each with its description."""
    if suspect.oracle.world_size == 1:
        return
    reduced = _unclipped(suspect)
    if not all(shard.is_whole for shard in suspect.own.values()):
        parts = [
            suspect.own[name].of(whole)
            for name, whole in reduced.items()
            if name in suspect.own
            and suspect.own[name].is_inside
            and suspect.own[name].global_shape == tuple(whole.shape)
        ]
        yield "this rank's shards alone", _norm(parts, order)
    own = [pieces[:, suspect.rank].sum(0) for pieces in suspect.at.contributions.values()]
    yield "this rank's own gradients, not synchronised", _norm(own, order)


def _unclipped(suspect: Suspect) -> dict[str, torch.Tensor]:
    divisor = suspect.oracle.divisor
    return {name: pieces.sum((0, 1)) / divisor for name, pieces in suspect.at.contributions.items()}


def _norm(tensors: list[torch.Tensor], order: float) -> float:
    elements = torch.cat([torch.zeros(1, dtype=torch.float64), *(t.abs().flatten() for t in tensors)])
    return float(torch.linalg.vector_norm(elements, order))
