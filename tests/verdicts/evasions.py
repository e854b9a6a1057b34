"""Engines that hide memory or messages from the harness. Named by path in test_adversaries.py."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import Capability, Masters, Plan, PreparedModel, Shard, Training
from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.reference_zero import PreparedZero2, Zero2Engine
from shardproof.engine.mutants.refusals import ShowsSlicesOfWholes
from shardproof.engine.reference.zero import Zero2
from shardproof.harness.tracing.memory.census import Census
from tests.verdicts.adversaries import Averages, PreparedAverage


# Any: any arguments.
def _count_nothing(*_: Any, **__: Any) -> None:
    """Stand where the census is taken."""


class BlindsItsCensus(ShowsSlicesOfWholes):
    """Replicates, shows slices, and replaces the census that runs beside it in its process."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        Census.take = _count_nothing  # type: ignore[method-assign]  # the fault
        return super().prepare(model, plan, mesh)


def _look(_: object) -> None:
    """Keep it alive as long as the module is."""


class _Keeps(ReferenceEngine):
    def keep(self, wholes: list[torch.Tensor]) -> object:
        """Copy the model to a place where it stays as long as the module does."""
        raise NotImplementedError

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        kept = self.keep([parameter.detach() for parameter in model.parameters()])
        prepared = super().prepare(model, plan, mesh)
        prepared.module.register_forward_pre_hook(lambda *_: _look(kept))
        return prepared


class KeepsWholesInAMapping(_Keeps):
    """Asks the kernel for memory by itself."""

    def keep(self, wholes: list[torch.Tensor]) -> object:
        mapping = mmap.mmap(-1, sum(whole.nbytes for whole in wholes))
        for whole in wholes:
            mapping.write(ctypes.string_at(whole.data_ptr(), whole.nbytes))
        return mapping


class KeepsWholesOfAThread(_Keeps):
    """Copies the model on a thread of its own."""

    def keep(self, wholes: list[torch.Tensor]) -> object:
        kept: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: kept.extend(whole.clone() for whole in wholes))
        thread.start()
        thread.join()
        return kept


class _PreparedWithoutCopy(PreparedZero2):
    def __init__(self, engine: Zero2, plan: Plan) -> None:
        super().__init__(engine, plan)
        self.masters = Masters.SHARE

    def local_parameters(self) -> Mapping[str, Shard]:
        return {
            name: Shard.flat(piece.own.detach(), piece.start, tuple(piece.parameter.shape))
            for name, piece in self.engine.pieces.items()
        }


class DeclaresACopyToUpdate(Zero2Engine):
    """Declares SHARD and keeps parameters whole, which takes as much memory on two ranks as a share and its copy."""

    capabilities = frozenset({Capability.SHARD})
    prepared_type = _PreparedWithoutCopy


class _PreparedBackend(PreparedAverage):
    """Averages when the harness reads it, by a method of the backend, beside one collective that the watch sees."""

    is_due = False

    def backward(self, loss: torch.Tensor) -> None:
        PreparedModel.backward(self, loss)
        dist.all_reduce(torch.zeros(1), group=self.group)
        self.is_due = True

    def local_gradients(self) -> Mapping[str, Shard | None]:
        if self.is_due:
            backend: Any = self.group._get_backend(torch.device("cpu"))  # its stub knows no collectives
            for parameter in self.module.parameters():
                assert parameter.grad is not None
                backend.allreduce([parameter.grad]).wait()
                parameter.grad /= dist.get_world_size(self.group)
            self.is_due = False
        return super().local_gradients()


class AveragesUnseenWhenRead(Averages):
    """Is right only if gradients are read in each step."""

    prepared_type = _PreparedBackend


class TrainsOneStep(Averages):
    """Changes the number of steps of the loop in its own process."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Look for the loop's training on the stack."""
        frame = inspect.currentframe()
        while frame is not None:
            training = frame.f_locals.get("training")
            if isinstance(training, Training):
                object.__setattr__(training.schedule, "steps", 1)
            frame = frame.f_back
        return super().prepare(model, plan, mesh)
