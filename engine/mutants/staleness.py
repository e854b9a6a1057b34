"""Mutants that use a value from too early: last step's parameters, or gradients not yet reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant


class Stale(PreparedModel):
    """Keeps the shards of two steps and swaps the older ones in for as long as a step computes; to be mixed in."""

    def __init__(
        self, *args: Any, **kwargs: Any
    ) -> None:  # Any: those of the prepared model it is mixed into
        super().__init__(*args, **kwargs)
        self._older: list[torch.Tensor] = []
        self._newest: list[torch.Tensor] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        """Run forward, from the second step on with old parameters."""
        if self._older and not self._newest:
            self._newest = self._copies()
            self._assign(self._older)
        return super().__call__(*inputs, **named)

    def step(self) -> None:
        """Update the parameters of now, whatever was computed with."""
        # What the optimizer updates, and everybody reads, is up to date: only forward and backward lag.
        if self._newest:
            self._assign(self._newest)
            self._newest = []
        self._older = self._copies()
        super().step()

    def _copies(self) -> list[torch.Tensor]:
        return [shard.clone() for shard in self._shards()]

    def _assign(self, values: list[torch.Tensor]) -> None:
        for shard, value in zip(self._shards(), values, strict=True):
            shard.copy_(value)

    def _shards(self) -> Iterator[torch.Tensor]:
        for parameter in self.owned_parameters().values():
            whole = parameter.detach()
            yield whole.to_local() if isinstance(whole, DTensor) else whole


class _PreparedStale(Stale, PreparedFullyShard):
    pass


@mutant(
    after="NVIDIA/Megatron-LM#663",
    kills_on=Condition(world_size=1, steps=2, because="the first step has no step before it"),
)
class ComputesWithStaleParameters(FullyShardEngine):
    """Forward and backward use the parameters of the step before.

    Reported: with overlapped gathering, forward read parameters of the step before.
    """

    prepared_type = _PreparedStale


class _PreparedHasty(PreparedModel):
    """Reduces copies of the gradients and waits for them when the optimizer has stepped already.

    The copies make the race one that is lost in the same way every time.
    """

    def __init__(self, ddp: DistributedDataParallel, *, named: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(ddp, named=named)
        self._group = group
        self._is_accumulating = False
        self._reduced: list[torch.Tensor] = []
        self._works: list[dist.Work] = []

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._is_accumulating:
            return
        self._wait()
        self._reduced = [p.grad.clone() for p in self._with_gradient() if p.grad is not None]
        self._works = [dist.all_reduce(t, group=self._group, async_op=True) for t in self._reduced]

    def step(self) -> None:
        super().step()
        self._wait()
        for parameter, total in zip(self._with_gradient(), self._reduced, strict=True):
            parameter.grad = total / self._group.size()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def _with_gradient(self) -> list[nn.Parameter]:
        return [p for p in self.named.parameters() if p.grad is not None]


@mutant(
    after="pytorch/pytorch#180666", kills_on=Condition(because="one rank's gradients are reduced already")
)
class StepsBeforeTheReduction(DistributedDataParallelEngine):
    """The optimizer steps before the reduced gradients have arrived.

    Reported: an optimizer that ran in backward read gradients whose copy was under way.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, take the reduction over, and wait for it too late."""
        ddp = super().prepare(model, plan, mesh).module
        assert isinstance(ddp, DistributedDataParallel)
        ddp.require_backward_grad_sync = False
        return _PreparedHasty(ddp, named=model, group=mesh.get_group())


class _PreparedReusing(PreparedFullyShard):
    _has_stepped = False

    def step(self) -> None:
        super().step()
        self._has_stepped = True

    def backward(self, loss: torch.Tensor) -> None:
        for parameter in self.owned_parameters().values() if self._has_stepped else ():
            parameter.grad = parameter.detach().clone()
        self._has_stepped = False
        super().backward(loss)


@mutant(
    after="NVIDIA/Megatron-LM#4609",
    kills_on=Condition(world_size=1, steps=2, because="the first step begins with an empty buffer"),
)
class AddsGradientsToParameters(FullyShardEngine):
    """From the second step on gradients are added to the parameters.

    Reported: one buffer was for gathered parameters and for gradients, and was not cleared in between.
    """

    prepared_type = _PreparedReusing


class _PreparedRepeating(PreparedDdp):
    def __init__(self, module: nn.Module, *, named: nn.Module) -> None:
        super().__init__(module, named=named)
        self._num_steps = 0
        self._second: list[torch.Tensor | None] = []

    def step(self) -> None:
        gradients = [p.grad for p in self.named.parameters()]
        if self._num_steps == 1:
            self._second = [None if g is None else g.clone() for g in gradients]
        for gradient, old in zip(gradients, self._second, strict=True) if self._num_steps > 1 else ():
            if gradient is not None and old is not None:
                gradient.copy_(old)
        self._num_steps += 1
        super().step()


@mutant(
    after="pytorch/pytorch#43307", kills_on=Condition(world_size=1, steps=3, because="two steps are right")
)
class RepeatsTheSecondGradients(DistributedDataParallelEngine):
    """From the third step on the optimizer is given the gradients of the second.

    Reported: what gradients were views of was exchanged, and what was copied later went where nobody looked; two
    iterations were right.
    """

    prepared_type = _PreparedRepeating


class _PreparedKeeping(PreparedDdp):
    def zero_grad(self, *, set_to_none: bool) -> None:
        *_, last = self.named.parameters()
        kept = None if last.grad is None else last.grad.clone()
        super().zero_grad(set_to_none=set_to_none)
        last.grad = kept


@mutant(
    after="pytorch/pytorch#94258",
    kills_on=Condition(world_size=1, steps=2, because="before the first step there is nothing to clear"),
)
class KeepsOneOldGradient(DistributedDataParallelEngine):
    """Clearing the gradients does not reach that of the last parameter.

    Reported: gradients that were to be reset to None in the reducer were still there.
    """

    prepared_type = _PreparedKeeping
