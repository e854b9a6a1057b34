"""An engine that insists on CUDA and reduces on a stream of its own, and another that forgets to wait."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Engine, Plan, PreparedModel


class _Reduced(PreparedModel):
    """Copies each gradient into a bucket on the device, reduces there, and copies back."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, waits: bool) -> None:
        super().__init__(module)
        if not torch.cuda.is_available():
            raise RuntimeError("this engine needs a GPU")
        self._group = group
        self._waits = waits
        self._stream = torch.cuda.Stream()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for parameter in self.module.parameters():
                self._reduce(parameter)
        if self._waits:
            event = torch.cuda.Event()
            event.record(self._stream)
            event.wait()

    def _reduce(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        bucket = torch.empty(parameter.numel(), device=torch.device("cuda", torch.cuda.current_device()))
        bucket.copy_(parameter.grad.view(-1))
        dist.all_reduce(bucket, group=self._group)
        parameter.grad.view(-1).copy_(bucket.to("cuda").cuda() / self._group.size())


class InsistsOnCuda(Engine):
    """The honest one."""

    name = "cuda.insists"
    capabilities = frozenset({Capability.REPLICATE})
    insists_on_cuda = True
    waits = True

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        return _Reduced(model, mesh.get_group(), waits=self.waits)


class StepsTooEarly(InsistsOnCuda):
    """Its optimizer reads gradients whose reduction may be in flight."""

    name = "cuda.steps_too_early"
    waits = False
