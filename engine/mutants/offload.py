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
from engine.mutants.mutant import Condition, mutant

_OFFLOAD = Plan(offload=Offload.CPU)


class _PreparedZero(PreparedReference):
    @torch.no_grad()
    def backward(self, loss: torch.Tensor) -> None:
        with torch.enable_grad():
            super().backward(loss)
        for gradient in _offloaded(self):
            gradient.zero_()


@mutant(
    after="flagos-ai/Torch-FL#62",
    kills_on=Condition(world_size=1, plan=_OFFLOAD, because="without offload nothing is copied"),
)
class OffloadsZeros(ReferenceEngine):
    """Gradients on the host are zeros.

    Reported: the copy to the host was ordered after another stream than that of the reduction.
    """

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


@mutant(
    after="pytorch/pytorch#180666",
    kills_on=Condition(world_size=1, steps=2, plan=_OFFLOAD, because="the first backward has none before"),
)
class OffloadsLastBackwardsGradients(ReferenceEngine):
    """Gradients on the host are those of the backward before.

    Reported: whoever read a gradient on the host read it before its copy had arrived.
    """

    prepared_type = _PreparedLate


class _PreparedOverwriting(Forgetful, PreparedReference):
    pass


@mutant(
    after="hpcaitech/ColossalAI#2496",
    kills_on=Condition(
        world_size=1,
        microbatches=2,
        plan=_OFFLOAD,
        because="before the first microbatch nothing is there",
    ),
)
class OverwritesOffloadedGradients(ReferenceEngine):
    """A gradient that arrives on the host replaces what was there.

    Reported: accumulation over backwards was neither supported nor refused.
    """

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


@mutant(
    after="pytorch/pytorch#85048",
    kills_on=Condition(world_size=1, plan=_OFFLOAD, because="without offload there is no copy"),
)
class UpdatesACopy(ReferenceEngine):
    """With offload the optimizer updates a copy of the last parameter.

    Reported: what pinning memory returned was dropped, so two tensors were taken to be one.
    """

    prepared_type = _PreparedCopying


def _offloaded(prepared: PreparedReference) -> Iterator[torch.Tensor]:
    """Give this rank's gradients, if the plan keeps them on the host."""
    if prepared.plan.offload is not Offload.NONE:
        yield from (_local(p.grad) for p in prepared.named.parameters() if p.grad is not None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
