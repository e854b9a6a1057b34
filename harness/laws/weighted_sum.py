"""A wrong gradient as the sum of the pieces of ranks and microbatches, in which some count another number of times."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mode

import torch

from shardproof.harness.laws.suspect import Suspect
from shardproof.harness.oracle.oracle_observation import Quantity

_MOST_NAMED = 3
_NO_WEIGHT = 1e-6


def weighted_sum(suspect: Suspect) -> str | None:
    """Name the pieces that count another number of times than the others; None if no weights explain the gradient.

    Fewest unknowns first: a weight for each microbatch, for each rank, for each piece; then the step before as well.
    """
    pieces, before = suspect.contributions, suspect.earlier(suspect.place.step - 1)
    if suspect.place.quantity is not Quantity.GRADIENT or pieces is None or pieces.is_complex():
        return None
    for names, terms in _terms(pieces / suspect.oracle.divisor):
        for more in ({}, {} if before is None else {"the step before": before}):
            columns = torch.stack([term.flatten() for term in (*terms, *more.values())], dim=1)
            # Twice as many equations as unknowns; fewer would let weights fit what no sum has made.
            if len(columns) < 2 * columns.shape[1]:
                continue
            weights = torch.linalg.lstsq(columns, suspect.got.flatten().unsqueeze(1)).solution
            if suspect.fits((columns @ weights).reshape(suspect.got.shape)):
                usual = [1.0] * len(names) + [0.0] * len(more)
                return _told(
                    [*names, *more], weights.flatten().tolist(), usual, is_scaled=suspect.clip is not None
                )
    return None


def _terms(pieces: torch.Tensor) -> Iterator[tuple[list[str], torch.Tensor]]:
    microbatches, ranks = pieces.shape[:2]
    of_ranks, of_microbatches = (range(ranks), range(microbatches))
    yield [f"microbatch {m}" for m in of_microbatches], pieces.sum(1)
    yield [f"rank {r}" for r in of_ranks], pieces.sum(0)
    yield [f"microbatch {m} of rank {r}" for m in of_microbatches for r in of_ranks], pieces.flatten(0, 1)


def _told(names: list[str], weights: list[float], expected: list[float], *, is_scaled: bool) -> str | None:
    """Name the unusual weights; of clipped gradients, which all have one more factor, beside the usual one."""
    scale, counted = 1.0, [weight for weight in weights if abs(weight) > _NO_WEIGHT]
    if is_scaled and counted:
        usual = mode(f"{weight:.3g}" for weight in counted)
        scale = next(weight for weight in counted if f"{weight:.3g}" == usual)
    counts = [(n, round(w / scale, 3) + 0.0, e) for n, w, e in zip(names, weights, expected, strict=True)]
    odd = [f"{name} counts {weight:g} times" for name, weight, right in counts if weight != right]
    if not odd:
        return None
    more = f", and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
    return f"a sum in which {', '.join(odd[:_MOST_NAMED])}{more}"
