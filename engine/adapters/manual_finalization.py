"""DDP whose callers finalize backwards, on every release of torch; mutants of that feature derive from it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import Capability


class ManuallyFinalized(DistributedDataParallel):
    """Holds each backward's gradients back, and reduces them in one message when the caller finalizes it."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._is_by_hand, self._awaits, self._num_ready = False, False, 0
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]

    def _count(self, _: torch.Tensor) -> None:
        self._num_ready += 1

    @property
    def require_manual_backward_finalization(self) -> bool:
        return self._is_by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.check(not self._awaits, "a backward awaits its finalization")
        self._is_by_hand = required

    @property
    def should_finalize_after_backward(self) -> bool:
        return False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not self._is_by_hand:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        self.check(not self._awaits, "the backward before awaits its finalization")
        self._awaits, self._num_ready = self.require_backward_grad_sync, 0
        with self.no_sync():
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def finalize_backward(self) -> None:
        parameters = [*self.module.parameters()]
        self.check(self._is_by_hand, "finalization by hand was not asked for")
        self.check(
            self._awaits and self._num_ready == len(parameters), "no reduction awaits its finalization"
        )
        self._awaits = False
        self.reduce([parameter.grad for parameter in parameters if parameter.grad is not None])

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise RuntimeError(otherwise)

    def reduce(self, gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
        dist.all_reduce(flat)
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


class _Prepared(PreparedDdp):
    interface = ManuallyFinalized


class ManualFinalizationEngine(DistributedDataParallelEngine):
    """DDP with torch 2.15's interface for callers that finalize backwards."""

    name = "torch.ddp.manual_finalization"

    capabilities = DistributedDataParallelEngine.capabilities | {Capability.FINALIZE}
    prepared_type = _Prepared
