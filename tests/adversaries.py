"""A small honest engine, and engines made of it that misbehave. Named by path in test_adversaries.py."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Engine, Plan, PreparedModel

CULPRIT = 1
SLEEP = ["sleep", "600"]
# What a rank leaves, and what would be collected with its prepared model.
_kept: list[object] = []


class PreparedAverage(PreparedModel):
    """Averages each gradient after backward, by one all-reduce of the sum."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(model)
        self.group, self.num_steps = group, 0
        if dist.get_rank() == CULPRIT:
            self.begin()

    def begin(self) -> None:
        """Hook of those that misbehave in prepare, on one rank."""

    def misbehave(self) -> None:
        """Hook of those that misbehave after the last step, on one rank."""

    def step(self) -> None:
        """Update the parameters."""
        super().step()
        self.num_steps += 1
        if self.num_steps == 2 and dist.get_rank() == CULPRIT:
            self.misbehave()

    def backward(self, loss: torch.Tensor) -> None:
        """Run it, and average."""
        super().backward(loss)
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= dist.get_world_size(self.group)


class Averages(Engine):
    """Replicates parameters, and averages gradients."""

    name = "averages"
    capabilities = frozenset({Capability.REPLICATE})
    prepared_type: ClassVar[type[PreparedAverage]] = PreparedAverage

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Take the model as it is."""
        plan.refuse_beyond(self.capabilities)
        return self.prepared_type(model, mesh.get_group())


class RefusesAndLeavesAChild(Averages):
    """Refuses what it cannot do on every rank, and leaves a process behind on one."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Start a process, then do as it should."""
        if dist.get_rank() == CULPRIT:
            _kept.append(subprocess.Popen(SLEEP))
        return super().prepare(model, plan, mesh)


class _PreparedDetached(PreparedAverage):
    def misbehave(self) -> None:
        _kept.append(subprocess.Popen(SLEEP, start_new_session=True))


class LeavesADetachedChild(Averages):
    """Leaves a program in a session of its own."""

    prepared_type = _PreparedDetached


class _PreparedDaemon(PreparedAverage):
    def misbehave(self) -> None:
        _fork_a_daemon()


class ForksADaemon(Averages):
    """Leaves a fork in a session of its own, which holds every pipe of the rank."""

    prepared_type = _PreparedDaemon


class _PreparedDeath(PreparedAverage):
    def misbehave(self) -> None:
        _fork_a_daemon()
        os.kill(os.getpid(), signal.SIGKILL)


class DiesBesideADaemon(Averages):
    """Is killed while a fork holds every pipe of the rank."""

    prepared_type = _PreparedDeath


def _fork_a_daemon() -> None:
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.write(writes, b"x")
        while True:
            signal.pause()
    os.read(reads, 1)


class _PreparedAbort(PreparedAverage):
    def begin(self) -> None:
        dist.destroy_process_group = lambda *_: os.abort()


class AbortsWhenGroupsAreDestroyed(Averages):
    """Trains as it should, and aborts when the process groups are destroyed."""

    prepared_type = _PreparedAbort
