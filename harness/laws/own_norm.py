"""The law over clipping that needs no oracle: an engine clips its gradients by their own norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.torch_compat.dtypes import widened


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipsByTheirNorm:
    """The gradients after clipping, divided by the factor that the returned norm makes, have that norm.

    The factor is that of `Clip.factor`. The noise of a training plays no part, so clipping by a norm of few bits shows
    wherever gradients have more. Another norm than the returned one shows only in comparison with the oracle's.
    """

    name: str = "gradients are clipped by their own norm"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compute the norm of each step from the shards of all ranks."""
        clip, broken, num_norms = evidence.training.schedule.clip, list[str](), 0
        assert clip is not None
        for step in range(evidence.training.schedule.steps):
            norms = {o.rank: o.steps[step].norm for o in evidence.ranks if step < len(o.steps)}
            gradients = _whole_gradients(evidence, step)
            after, rounding = _norm_of(gradients, clip.norm_type)
            for rank, norm in norms.items():
                if norm is None or not gradients or not math.isfinite(norm):
                    continue
                num_norms += 1
                expected = after / clip.factor(norm)
                allowed = rounding * max(expected, norm)
                if abs(norm - expected) > allowed:
                    broken.append(
                        f"step {step}, rank {rank}: expected {expected:.9g}, which gradients that were clipped to "
                        f"{clip.max_norm:g} by {norm:.9g} had, got {norm:.9g}, off by more than {allowed:.2g}"
                    )
        return rule(self.name, broken, held=f"of {num_norms} norms")


def _norm_of(gradients: Mapping[str, torch.Tensor], norm_type: float) -> tuple[float, float]:
    """Return the norm of gradients, and the largest relative error that rounding makes of it; of none it is zero."""
    parts = [widened(gradient).abs().flatten() for gradient in gradients.values()]
    elements = torch.cat([torch.zeros(1, dtype=torch.float64), *parts])
    eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, *(g.dtype for g in gradients.values())))
    return torch.linalg.vector_norm(elements, norm_type).item(), eps * (8 + elements.numel() ** 0.5)


def _whole_gradients(evidence: Evidence, step: int) -> dict[str, torch.Tensor]:
    """Assemble the gradients that ranks showed; empty if a part of one is on no rank."""
    wholes: dict[str, torch.Tensor] = {}
    for observation in evidence.ranks:
        shown = observation.steps[step].gradients if step < len(observation.steps) else {}
        for name, shard in shown.items():
            if shard is None or not shard.is_inside:
                continue
            missing = torch.full(shard.global_shape, math.nan, dtype=shard.tensor.dtype)
            shard.of(wholes.setdefault(name, missing)).copy_(shard.tensor)
    is_complete = all(whole.isfinite().all() for whole in wholes.values())
    return wholes if is_complete else {}
