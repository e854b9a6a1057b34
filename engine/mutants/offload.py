"""Mutants that sin where parameters and gradients live on the host alone; other plans get an honest engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.contract import Offload, Plan, PreparedModel
from engine.mutants.accumulation import Forgetful

__all__ = ["OffloadsLastBackwardsGradients", "OffloadsZeros", "OverwritesOffloadedGradients", "UpdatesACopy"]


class _PreparedZero(PreparedReference):
    @torch.no_grad()
    def backward(self, loss: torch.Tensor) -> None:
        with torch.enable_grad():
            super().backward(loss)
        for gradient in _offloaded(self):
            gradient.zero_()


class OffloadsZeros(ReferenceEngine):
    """Gradients on the host are zeros: they were read before anything was copied there.

    After flagos-ai/Torch-FL#62: the copy to the host was ordered after another stream than that of the reduction.
    """

    name = "mutant.OffloadsZeros"
    prepared_type = _PreparedZero


class _PreparedLate(PreparedReference):
    """Hands out each backward's gradients after the next one."""

    _last: list[torch.Tensor]

    @torch.no_grad()
    def backward(self, loss: torch.Tensor) -> None:
        with torch.enable_grad():
            super().backward(loss)
        fresh = [gradient.clone() for gradient in _offloaded(self)]
        for gradient, last in zip(_offloaded(self), getattr(self, "_last", fresh), strict=True):
            gradient.copy_(last)
        self._last = fresh


class OffloadsLastBackwardsGradients(ReferenceEngine):
    """Gradients on the host are those of the backward before; the first are right.

    After pytorch/pytorch#180666: whoever read a gradient on the host read it before its copy had arrived.
    """

    name = "mutant.OffloadsLastBackwardsGradients"
    prepared_type = _PreparedLate


class _PreparedOverwriting(Forgetful, PreparedReference):
    pass


class OverwritesOffloadedGradients(ReferenceEngine):
    """A gradient that arrives on the host takes the place of the one that was there, instead of being added.

    After hpcaitech/ColossalAI#2496: accumulation over backwards was neither supported nor refused.
    """

    name = "mutant.OverwritesOffloadedGradients"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; with offload each backward clears what was there."""
        honest = super().prepare(model, plan, mesh)
        assert isinstance(honest, PreparedReference)
        if plan.offload is Offload.NONE:
            return honest
        return _PreparedOverwriting(honest.module, plan, honest.door)


class _PreparedCopying(PreparedReference):
    """Steps over the shards, and puts back the last one of the parameters."""

    @torch.no_grad()
    def step(self) -> None:
        *_, last = self.named.parameters()
        kept = _local(last).clone()
        super().step()
        if self.plan.offload is not Offload.NONE:
            _local(last).copy_(kept)


class UpdatesACopy(ReferenceEngine):
    """The optimizer updates a copy of the last parameter, which nobody reads.

    After pytorch/pytorch#85048: what pinning memory returned was dropped, so two tensors were taken to be one.
    """

    name = "mutant.UpdatesACopy"
    prepared_type = _PreparedCopying


def _offloaded(prepared: PreparedReference) -> Iterator[torch.Tensor]:
    """Give this rank's gradients, if the plan keeps them on the host."""
    if prepared.plan.offload is not Offload.NONE:
        yield from (_local(p.grad) for p in prepared.named.parameters() if p.grad is not None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
