"""Mutants that never end: a rank leaves a call out, orders groups differently, or is stuck."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import is_last_rank

_PAUSE_S = 0.0005  # most processor time is for others, which run at the same time


def _group_of_all() -> dist.ProcessGroup:
    """Make another group of all ranks."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(group, dist.ProcessGroup)
    return group


class _PreparedCounting(PreparedDdp):
    """Agrees after each step on how many ranks took it, in a group of its own."""

    def __init__(self, module: nn.Module, *, named: nn.Module) -> None:
        super().__init__(module, named=named)
        self.steps = 0
        self.first, self.second = _group_of_all(), _group_of_all()

    def step(self) -> None:
        super().step()
        self.agree()
        self.steps += 1

    def agree(self) -> None:
        self.count(self.first)

    def count(self, group: dist.ProcessGroup) -> None:
        """Sum ones over a group."""
        dist.all_reduce(torch.ones(1), group=group)


@mutant(after="verl-project/verl#5591", trace=Trace.HANG)
class SkipsACountOnTheLastRank(DistributedDataParallelEngine):
    """The last rank leaves out a reduction that the others make."""

    class Prepared(_PreparedCounting):
        def agree(self) -> None:
            if not (is_last_rank() and self.steps == 1):
                super().agree()


@mutant(after="meta-pytorch/torchrec#4149", trace=Trace.HANG)
class TakesTwoGroupsInTurn(DistributedDataParallelEngine):
    """The last rank issues the collectives of two groups in another order."""

    class Prepared(_PreparedCounting):
        def agree(self) -> None:
            groups = (self.first, self.second)
            for group in groups[::-1] if is_last_rank() else groups:
                self.count(group)


@mutant(after="RLinf/RLinf#1540", trace=Trace.HANG)
class ReducesInTheWrongGroup(DistributedDataParallelEngine):
    """The last rank waits in another group of the same ranks."""

    class Prepared(_PreparedCounting):
        def agree(self) -> None:
            self.count(self.second if is_last_rank() else self.first)


def _search() -> None:
    """Multiply until the product changes, which it never does."""
    found = torch.eye(2)
    while torch.equal(found @ found, found):
        time.sleep(_PAUSE_S)


@mutant(after="vllm-project/vllm#8410", trace=Trace.HANG)
class NeverComesToAnEnd(FullyShardEngine):
    """The last rank computes forever."""

    class Prepared(PreparedFullyShard):
        def __init__(self, module: nn.Module, plan: Plan) -> None:
            super().__init__(module, plan)
            self._steps = 0

        def __call__(self, *inputs: Any, **named: Any) -> object:
            if is_last_rank() and self._steps == 1:
                _search()
            return super().__call__(*inputs, **named)

        def step(self) -> None:
            super().step()
            self._steps += 1


@mutant(after="horovod/horovod#3352", trace=Trace.HANG)
class LocksItselfOut(DistributedDataParallelEngine):
    """Two threads of the last rank wait for each other."""

    class Prepared(_PreparedCounting):
        """Counts on a thread, for which the last rank waits while it holds a lock that the thread needs."""

        def agree(self) -> None:
            lock = threading.Lock()
            thread = threading.Thread(target=self._count_under, args=(lock,), name="counting", daemon=True)
            if is_last_rank() and self.steps == 1:
                with lock:
                    thread.start()
                    thread.join()
            thread.start()
            thread.join()

        def _count_under(self, lock: threading.Lock) -> None:
            with lock:
                self.count(self.first)


@mutant(after="pytorch/pytorch#108378", trace=Trace.HANG)
class SendsToNobody(DistributedDataParallelEngine):
    """Rank 0 sends what no rank receives."""

    class Prepared(_PreparedCounting):
        def agree(self) -> None:
            if self.steps == 1 and dist.get_rank() == 0 and not is_last_rank():
                dist.send(torch.ones(1), dist.get_world_size() - 1)


@mutant(after="pytorch/pytorch#68803", trace=Trace.HANG)
class CountsFewerParametersOnTheLastRank(DistributedDataParallelEngine):
    """In prepare the last rank makes one collective less than the others."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        group = _group_of_all()
        ignored = 1 if is_last_rank() else 0
        for _ in list(model.parameters())[ignored:]:
            dist.all_reduce(torch.ones(1), group=group)
        return super().prepare(model, plan, mesh)


@mutant(after="NVIDIA-NeMo/Automodel#2468", trace=Trace.HANG)
class SkipsABackwardOnTheLastRank(DistributedDataParallelEngine):
    """In one step the last rank's backward does not reduce."""

    class Prepared(PreparedDdp):
        def __init__(self, module: nn.Module, *, named: nn.Module) -> None:
            super().__init__(module, named=named)
            self._steps = 0

        def __call__(self, *inputs: Any, **named: Any) -> object:
            assert isinstance(self.module, DistributedDataParallel)
            self.module.require_backward_grad_sync = not (is_last_rank() and self._steps == 1)
            return super().__call__(*inputs, **named)

        def step(self) -> None:
            super().step()
            self._steps += 1
