"""Engines with a bug as a colleague may write one, over DDP; each is found in a user's model, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof import Capability, Engine, Plan, PreparedModel


class OverDdp(Engine):
    """DDP that keeps each rank's buffers; the others differ from it in one place."""

    name = "over_ddp"
    capabilities = frozenset(
        {
            Capability.REPLICATE,
            Capability.ACCUMULATE,
            Capability.CLIP,
            Capability.STATE,
            Capability.OWN_BUFFERS,
            Capability.UNUSED,
        }
    )
    prepared: ClassVar[type[PreparedModel]] = PreparedModel
    options: ClassVar[dict[str, Any]] = {"broadcast_buffers": False}

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        group: Any = mesh.get_group()
        module = DistributedDataParallel(model, process_group=group, **self.options)
        self.hook(module, group)
        return self.prepared(module, named=model)

    def hook(self, module: DistributedDataParallel, group: Any) -> None:
        """Change the reduction."""


class BroadcastsBuffers(OverDdp):
    """It says that ranks keep their buffers, and broadcasts those of the first before each forward."""

    name = "broadcasts_buffers"
    options: ClassVar[dict[str, Any]] = {"broadcast_buffers": True}


class AveragesTwice(OverDdp):
    name = "averages_twice"

    def hook(self, module: DistributedDataParallel, group: Any) -> None:
        """Divide before and after the reduction."""

        def reduce(state: object, bucket: Any) -> Any:
            work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda done: done.value()[0].div_(group.size()))

        _register(module, reduce)


class _Forgets(PreparedModel):
    def full_state(self) -> dict[str, Any]:
        state = super().full_state()
        for of_parameter in state["optimizer"]["state"].values():
            of_parameter["exp_avg_sq"] = torch.zeros_like(of_parameter["exp_avg_sq"])
        return state


class ForgetsMoments(OverDdp):
    name = "forgets_moments"
    prepared = _Forgets


class _ScalesTwice(PreparedModel):
    num_held = 0

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.num_held += 1
        with super().accumulating():
            yield

    def step(self) -> None:
        count, self.num_held = self.num_held + 1, 0
        for parameter in self.named.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        super().step()


class ScalesAccumulationTwice(OverDdp):
    name = "scales_accumulation_twice"
    prepared = _ScalesTwice


class _ClipsAlone(PreparedModel):
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        norms = [super().clip_grad_norm_(max_norm, norm_type)]
        return norms[0] / dist.get_world_size()


class ReportsAShareOfTheNorm(OverDdp):
    name = "reports_a_share_of_the_norm"
    prepared = _ClipsAlone


class StopsAfterEvaluation(OverDdp):
    name = "stops_after_evaluation"

    def hook(self, module: DistributedDataParallel, group: Any) -> None:
        """Stop to synchronise once the model has been evaluated."""
        evaluate = module.eval

        def stop() -> DistributedDataParallel:
            module.require_backward_grad_sync = False
            return evaluate()

        module.eval = stop  # type: ignore[method-assign]  # of this module


class StopsAfterTwoSteps(OverDdp):
    name = "stops_after_two_steps"

    def hook(self, module: DistributedDataParallel, group: Any) -> None:
        """Reduce no gradient from the third step on."""
        calls: list[int] = []

        def reduce(state: object, bucket: Any) -> torch.futures.Future[Any]:
            calls.append(1)
            future: torch.futures.Future[Any] = torch.futures.Future()
            if len(calls) <= 2:
                dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
            future.set_result(bucket.buffer())
            return future

        _register(module, reduce)


def _register(module: DistributedDataParallel, reduce: Callable[..., Any]) -> None:
    reduce.__annotations__.clear()  # texts here, and torch takes only its own classes
    module.register_comm_hook(None, reduce)
