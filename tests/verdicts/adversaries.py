"""A small honest engine, and engines made of it that misbehave. Named by path in test_adversaries.py."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Engine, Plan, PreparedModel
from tests.worlds.ends import CULPRIT, forked

SLEEP = ["sleep", "600"]
# Keeps leftovers of a rank from being collected with its prepared model.
_kept: list[object] = []
Act = Callable[[], object]


def _nothing() -> None:
    """Do nothing."""


class PreparedAverage(PreparedModel):
    """Averages each gradient after backward, by one all-reduce of the sum; one rank does more than that."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, at_first: Act = _nothing, at_last: Act = _nothing
    ) -> None:
        super().__init__(model)
        self.group, self.num_steps, self._at_last = group, 0, at_last
        if dist.get_rank() == CULPRIT:
            at_first()

    def step(self) -> None:
        super().step()
        self.num_steps += 1
        if self.num_steps == 2 and dist.get_rank() == CULPRIT:
            self._at_last()

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= dist.get_world_size(self.group)


class Averages(Engine):
    """Replicates parameters, and averages gradients; one rank misbehaves in prepare, or after the last step."""

    name = "averages"
    capabilities = frozenset({Capability.REPLICATE})
    prepared_type: ClassVar[type[PreparedAverage]] = PreparedAverage

    def __init__(self, *, at_first: Act = _nothing, at_last: Act = _nothing) -> None:
        self._at_first, self._at_last = at_first, at_last

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        return self.prepared_type(model, mesh.get_group(), self._at_first, self._at_last)


class RefusesAndLeavesAChild(Averages):
    """Refuses unsupported plans on every rank, and leaves a process behind on one."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if dist.get_rank() == CULPRIT:
            _kept.append(subprocess.Popen(SLEEP))
        return super().prepare(model, plan, mesh)


def _die_beside_a_daemon() -> None:
    forked(sessions=1)
    os.kill(os.getpid(), signal.SIGKILL)


def _abort_when_groups_are_destroyed() -> None:
    dist.destroy_process_group = lambda *_: os.abort()


def _leave_files() -> None:
    with tempfile.NamedTemporaryFile(delete=False, suffix=".cache") as file:
        file.write(bytes(100))
    Path("/dev/shm", f"left-{os.getpid()}").write_bytes(bytes(200))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "gone").write_bytes(bytes(300))


leaves_files = Averages(at_last=_leave_files)
leaves_a_detached_child = Averages(
    at_last=lambda: _kept.append(subprocess.Popen(SLEEP, start_new_session=True))
)
dies_beside_a_daemon = Averages(at_last=_die_beside_a_daemon)
aborts_when_groups_are_destroyed = Averages(at_first=_abort_when_groups_are_destroyed)
